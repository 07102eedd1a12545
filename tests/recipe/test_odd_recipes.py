"""Recipes that nobody meant: each is a plan, or refused with its key and exit code 2 before anything starts."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.cli.main import main
from asyncrl.recipe.config import SECTIONS, load_recipe
from tests.modelfolder import write_model

CODE = """
import asyncio
import math
import sys

import asyncrl as rl


class Guess(rl.Env):
    def __init__(self, limit=3):
        self.limit = limit

    async def reset(self, row):
        return [{"role": "user", "content": "?"}]

    async def reward(self, traj, row):
        return 0.0


class Half(rl.Env):
    pass


class Other:
    pass


def rows():
    return [{"number": i} for i in range(4)]


def nothing():
    return None


def needs(path):
    return [path]


def raises():
    return {}["train"]


def inside():
    return math.sqrt(-1)


def leaves():
    sys.exit(3)


async def later():
    return [1]


def endless():
    while True:
        yield 1


def number():
    return 7


def text():
    return "rows.jsonl"


def splits():
    return {"train": [1], "test": [2]}


def empty():
    return []


class Unreadable(list):
    def __iter__(self):
        raise KeyError("row 3")


def unreadable():
    return Unreadable([1])


def build(directory):
    raise RuntimeError("no space")


VALUE = 5
NONE = None
"""
BASE: Mapping[str, Mapping[str, str]] = {
    "model": {"path": "'model'"},
    "env": {"factory": "'env.py:Guess'"},
    "data": {"train": "'env.py:rows'"},
    "trainer": {"steps": "4", "groups_per_step": "2", "max_staleness": "0"},
    "optimizer": {"lr": "1e-3"},
}
ODD = [
    *(
        "{}",
        "[]",
        "''",
        "nan",
        "inf",
        "-inf",
        "0",
        "-1",
        "1e999",
        "1e-999",
        "1" + "0" * 400 + ".0",
        "true",
        "[[1, 'a']]",
    ),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "9" * 5000, "0x" + "f" * 5000),
    *("1979-05-27", "1979-05-27T07:32:00Z", "0000-00-00", "07:32:00", "[" * 300 + "]" * 300, "[" * 5000, "{a={b={}}}"),
    *('"\\u0000"', '"\\ud800"', "'" + "x" * 10_000 + "'", "'/'", "'..'", "'a:b'", "':'", "'env.py:'", "'env.py:rows'"),
    *("'env.py:nothing'", "'builtins:int'", "'builtins:len'", "'http://[::1'", "['http://a', 'http://a']", "[1, [2]]"),
]


def _keys() -> list[tuple[str, str]]:
    """Every key of a recipe, and some that are none."""
    found = {
        ("advantage", "kind"),
        ("loss", "eps_max"),
        ("env", "limit"),
        ("env", "nobody"),
        ("trainer", "nobody"),
        ("nobody", "nobody"),
    }
    return sorted(found | {(name, key) for name, parts in SECTIONS.items() for part in parts for key in part})


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower()


def _recipe(changes: Mapping[tuple[str, str], str]) -> str:
    tables = {name: dict(table) for name, table in BASE.items()}
    for (section, key), value in changes.items():
        tables.setdefault(section, {})[key] = value
    lines = [[f"[{name}]", *(f"{key} = {value}" for key, value in table.items())] for name, table in tables.items()]
    return "\n".join(line for table in lines for line in table)


PLAIN = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=20))
VALUES = st.one_of(
    st.sampled_from(ODD),
    st.recursive(
        PLAIN,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=5,
    ).map(_toml),
)
KEYS = st.sampled_from(_keys())
CHANGES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=3)
FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's folder with its Python file and model; a run that begins ends at once."""

    async def no_steps(*_: object) -> None:
        pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("asyncrl.training.attended._take_steps", no_steps)
    (tmp_path / "env.py").write_text(CODE, encoding="utf-8")
    write_model(tmp_path / "model")
    return tmp_path


def _train(folder: Path, content: str | bytes, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of ``asyncrl train``; what begins has a run file that can be read."""
    recipe = folder / "recipe.toml"
    recipe.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
        code = main(["train", str(recipe), "--run-dir", str(run), *arguments])
    if code == 0:
        assert orjson.loads((run / "run.json").read_bytes())["configuration"]
    else:
        assert not run.exists(), "nothing was started"
    return code, stderr.getvalue()


def _require_plan_or_refusal(folder: Path, content: str | bytes, *arguments: str) -> None:
    code, said = _train(folder, content, *arguments)
    assert code in (0, 2), said
    if code == 2:
        assert f"asyncrl: {folder / 'recipe.toml'}: " in said
        assert "Traceback" not in said
        assert len(said) < 2000 + 10 * len(str(folder)), "what was found is cut to a sane length"


@pytest.mark.slow
@FUZZ
@given(changes=CHANGES)
def test_odd_values_are_a_plan_or_refused_by_name(folder: Path, changes: dict[tuple[str, str], str]) -> None:
    """Of any type, size and depth, at every key."""
    _require_plan_or_refusal(folder, _recipe(changes))


@pytest.mark.slow
def test_every_key_refuses_what_it_cannot_be_by_its_name(folder: Path) -> None:
    """A table, a date, and a deep nesting at each key in turn."""
    for key in _keys():
        for value in ("{}", "1979-05-27", "[" * 300 + "]" * 300):
            _require_plan_or_refusal(folder, _recipe({key: value}))


@pytest.mark.slow
@settings(FUZZ, max_examples=60)
@given(
    assignment=st.one_of(st.text(max_size=30), st.builds("{0[0]}.{0[1]}={1}".format, st.sampled_from(_keys()), VALUES))
)
def test_odd_overrides_are_a_plan_or_refused_by_name(folder: Path, assignment: str) -> None:
    """Whatever a shell passes on, which is no character 0."""
    if "\0" not in assignment:
        _require_plan_or_refusal(folder, _recipe({}), f"--set={assignment}")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trainer.steps=2\nloss='x'", "trainer.steps is \"2\\nloss='x'\""),
        ("rollout.seed=" + "9" * 5000, "--set rollout.seed: has a value that cannot be read"),
        (".".join("a" * 2000) + "=1", "--set is 'a.a."),
        ("env.limit=" + "[" * 4000, "--set env.limit: is nested too deeply"),
        ("env.limit=" + "[" * 100 + "]" * 100, "--set env.limit: value.0.0"),
        ("env.limit='\udcff'", "--set is \"env.limit='"),
        ("data.train.x=1", "--set data.train.x: train is 'env.py:rows' and no table"),
    ],
)
def test_overrides_are_refused_by_name(folder: Path, assignment: str, message: str) -> None:
    """A second value after the first, numbers and nestings without end, bytes that are no text."""
    code, said = _train(folder, _recipe({}), "--set", assignment)
    assert code == 2
    assert message in said


@pytest.mark.slow
@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_odd_files_are_a_plan_or_refused_by_name(folder: Path, data: st.DataObject) -> None:
    """Bytes that are no text, and recipes with a piece left out, doubled or replaced."""
    whole = _recipe({}).encode()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    piece = data.draw(st.one_of(st.binary(max_size=10), st.just(whole[start:end] * 2)))
    _require_plan_or_refusal(folder, whole[:start] + piece + whole[end:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not TOML, which is UTF-8"),
        (_recipe({}) + "\nlr = 2\n", "is not TOML: Cannot overwrite a value"),
        (_recipe({("advantage", "kind"): "{}"}), "advantage.kind is {}, but must be one of 'group_centered'"),
        (_recipe({("rollout", "seed"): "9" * 5000}), "has a value that cannot be read: Exceeds the limit"),
        (_recipe({("rollout", "seed"): "0x" + "f" * 5000}), "rollout.seed is <int>, but must be an integer of 64 bits"),
        (_recipe({("rollout", "seed"): "[" * 9000}), "is nested too deeply"),
        (_recipe({("env", "limit"): "{a=" * 40 + "1" + "}" * 40}), "env.limit.a.a.a"),
        (_recipe({("sampler", "api_key_env"): "'NOBODY_SETS_IT'"}), "sampler.api_key_env is 'NOBODY_SETS_IT'"),
        (_recipe({("run", "directory"): '"a\\u0000b"'}), "run.directory is 'a\\x00b'"),
    ],
)
def test_files_are_refused_by_name(folder: Path, content: str | bytes, message: str) -> None:
    """One line says what and where."""
    code, said = _train(folder, content)
    assert code == 2
    assert f"recipe.toml: {message}" in said


def test_a_folder_is_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is a path that no system has."""
    for path, message in ((str(tmp_path), "Is a directory"), ("a\0b", "null byte"), ("x" * 5000, "File name too long")):
        assert main(["train", path]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--run-dir", "--resume"])
@pytest.mark.parametrize("path", ["file", "file/inner", "a\0b", "x" * 5000])
def test_what_cannot_be_a_run_directory_is_refused(folder: Path, option: str, path: str) -> None:
    """By the option's name."""
    (folder / "file").touch()
    recipe = folder / "recipe.toml"
    recipe.write_text(_recipe({}), encoding="utf-8")
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        assert main(["train", str(recipe), option, str(folder / path)]) == 2
    assert f"{option} is " in stderr.getvalue()


REFUSED = {
    ("data", "train"): {
        "nothing": "what data.train = 'env.py:nothing' returned is None",
        "needs": "the other keys of [data]: missing a required argument: 'path'",
        "raises": "which raised: KeyError: 'train' (",
        "inside": "which raised: ValueError: math domain error (",
        "leaves": "which raised: SystemExit: 3 (",
        "later": "the other keys of [data]: it is an async function",
        "endless": "returned is <generator object endless",
        "number": "returned is 7",
        "text": "returned is 'rows.jsonl', but must be the rows themselves",
        "splits": "returned is {'train': [1], 'test': [2]}, but must be a list of rows",
        "empty": "returned is [], but must be a sequence with at least one row",
        "unreadable": "which cannot be read: KeyError: 'row 3'",
        "VALUE": "data.train is 'env.py:VALUE', but must be a function",
        "Other": "data.train is 'env.py:Other', but must be a function",
        "row": "env.py has no 'row'; did you mean 'rows'?",
    },
    ("env", "factory"): {
        "Half": "Half lacks the method(s) reset, reward",
        "Other": "env.factory is 'env.py:Other', but must be an Env class",
        "VALUE": "env.factory is 'env.py:VALUE', but must be an Env class",
        "NONE": "env.factory is 'env.py:NONE', but must be an Env class",
        "needs": "missing a required argument: 'path'",
    },
}


@pytest.mark.parametrize(
    ("key", "name", "message"), [(key, *case) for key, cases in REFUSED.items() for case in cases.items()]
)
def test_code_that_cannot_be_used_is_refused_by_name(
    folder: Path, key: tuple[str, str], name: str, message: str
) -> None:
    """What it returns, raises and takes; where it raised is said with the user's file and line."""
    code, said = _train(folder, _recipe({key: f"'env.py:{name}'"}))
    assert code == 2, said
    assert message in said
    if "raised" in message:
        line = next(number for number, text in enumerate(CODE.splitlines(), start=1) if text.startswith(f"def {name}"))
        assert f"({folder / 'env.py'}:{line + 1} in {name})" in said


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("builtins:int", "env.factory is 'builtins:int', but must be an Env class"),
        ("builtins:len", "missing a required"),
        ("builtins:nope", "builtins has no 'nope'"),
        ("no.such.module:Env", "which cannot be imported: ModuleNotFoundError"),
        (".relative:Env", "which cannot be imported: TypeError"),
        ("env.py", "a reference such as"),
        (":Env", "a reference such as"),
        ("nowhere.py:Env", "but there is no file"),
        ("model.py:Env", "but there is no file"),
        ("x" * 3000 + ".py:Env", "but there is no file '/"),
    ],
)
def test_a_reference_to_nothing_is_refused_by_name(folder: Path, reference: str, message: str) -> None:
    """Installed modules and files; a folder is no file."""
    (folder / "model.py").mkdir()
    code, said = _train(folder, _recipe({("env", "factory"): f"'{reference}'"}))
    assert code == 2, said
    assert message in said


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence ({file}:3)"),
        ("import sys; sys.exit('no')", "SystemExit: no ({file}:3)"),
        ("def broken(:", "SyntaxError: invalid syntax (env.py, line 3) ({file}:3)"),
        ("import json; json.loads('{')", "({file}:3)"),
        ("def __getattr__(name): raise KeyError(name)", "KeyError: 'Guess' ({file}:3 in __getattr__)"),
        ("\udcff", "cannot be imported: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_says_where(folder: Path, code: str, message: str) -> None:
    """In the user's file, also if the error comes from a library that it called."""
    file = folder / "env.py"
    file.write_bytes(f"\n\n{code}\n".encode(errors="surrogateescape"))
    exit_code, said = _train(folder, _recipe({}))
    assert exit_code == 2, said
    assert "env.factory is 'env.py:Guess', which cannot be imported: " in said
    assert message.format(file=file) in said


@pytest.mark.parametrize("name", ["raises", "rows", "Other", "VALUE"])
def test_a_model_source_that_makes_none_is_refused_by_name(folder: Path, name: str) -> None:
    """Before anything is sampled; and no half model is kept."""
    recipe = _recipe({}).replace("path = 'model'", f"source = 'env.py:{'build' if name == 'raises' else name}'")
    code, said = _train(folder, recipe)
    assert code == 2, said
    assert "model.source is 'env.py:" in said
    assert not list((folder / "cache").rglob("config.json"))


def test_whole_recipes_load_without_their_code(folder: Path) -> None:
    """What the tests above change is right as it is."""
    recipe = folder / "recipe.toml"
    recipe.write_text(_recipe({}), encoding="utf-8")
    assert load_recipe(recipe).steps == 4
    assert _train(folder, _recipe({}))[0] == 0
