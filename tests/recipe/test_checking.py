from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.cli.main import main
from tests.rollout.families import make_family_tokenizer

RECIPE = """
[model]
path = "{model}"
[env]
factory = "env.py:Talk"
[data]
train = "env.py:rows"
[trainer]
steps = 1
groups_per_step = 1
max_staleness = 0
[budget]
max_generated_tokens = 100
[optimizer]
lr = 1e-3
[run]
directory = "{run}"
"""
BODIES = {
    "__init__": "self.said = 0",
    "reset": "return [{'role': 'user', 'content': row['question']}]",
    "look": "return 'a page'",
    "count": "return str(n)",
    "on_turn": "return await super().on_turn(traj)",
    "reward": "return float(bool(traj.final_text))",
    "on_truncated": "return 0.5",
    "snapshot": "return {'said': self.said}",
    "restore": "self.said = state['said']",
    "close": "self.said = -1",
}
HEADS = {
    "__init__": "def __init__(self)",
    "reset": "async def reset(self, row)",
    "look": "@rl.tool\n    async def look(self, query: str, pages: list[int], exact: bool = False) -> str",
    "count": "@rl.tool\n    def count(self, n: int) -> str",
    "on_turn": "async def on_turn(self, traj)",
    "reward": "def reward(self, traj, row)",
    "on_truncated": "async def on_truncated(self, traj, row, cause)",
    "snapshot": "async def snapshot(self, traj)",
    "restore": "async def restore(self, traj, state)",
    "close": "async def close(self)",
}
DOCS = {"look": '"""Look."""\n        ', "count": '"""Count."""\n        '}
VERDICTS = ("ok", "warning", "wrong", "not checked")


class Checked(NamedTuple):
    """What ``asyncrl check`` printed."""

    code: int
    out: str
    err: str
    line: int
    """Of the environment's file, where the mark is."""

    def findings(self, verdict: str) -> list[str]:
        """What was told with this verdict, each with its lines."""
        starts = "|".join(VERDICTS)
        blocks = re.split(rf"^(?=(?:{starts}) )", self.out, flags=re.MULTILINE)
        return [block for block in blocks if block.startswith(verdict + " ")]


Check = Callable[..., Checked]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model that is a tokenizer; its weights are only looked for."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / "model"
        make_family_tokenizer(family, "characters").save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"vocab_size": 200, "max_position_embeddings": 2000}))
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    made: dict[str, Path] = {}
    return lambda family: made.get(family) or made.setdefault(family, make(family))


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], models: Callable[[str], Path]) -> Check:
    """``asyncrl check`` of an environment whose bodies are replaced, or of a recipe whose text is."""

    def run(
        *arguments: str, family: str = "json tags", code: str | None = None, recipe: str = RECIPE, **bodies: str
    ) -> Checked:
        docs = {"look": '"""Look."""\n        ', "count": '"""Count."""\n        '} | {"no": ""}
        if bodies.pop("undocumented", ""):
            docs = {}
        methods = [
            f"    {HEADS[name]}:\n        {docs.get(name, '')}{body}"
            for name, body in (BODIES | bodies).items()
            if body
        ]
        text = "import anyio\nimport time\nimport asyncrl as rl\n\nclass Talk(rl.Env):\n    recovery = 'snapshot'\n"
        rows = "\ndef rows():\n    return [{'question': 'why?'}]\n"
        text = text + "\n".join(methods) + "\n" + rows if code is None else code
        (tmp_path / "env.py").write_text(text)
        (tmp_path / "recipe.toml").write_text(recipe.format(model=models(family), run=tmp_path / "runs"))
        exit_code = main(["check", str(tmp_path / "recipe.toml"), *arguments])
        captured = capsys.readouterr()
        marked = [number for number, line in enumerate(text.splitlines(), 1) if "# here" in line]
        return Checked(exit_code, captured.out, captured.err, marked[0] if marked else 0)

    return run


@pytest.mark.slow
def test_a_sound_recipe_is_all_ok(check: Check) -> None:
    """Every part has a line, the prompt is shown with its tools, and each tool was called once."""
    checked = check()
    assert (checked.code, checked.findings("wrong"), checked.findings("warning")) == (0, [], [])
    for part in (
        "env: Talk",
        "data.train: 1 rows",
        "model: ",
        "run.directory: ",
        "tools: look, count",
        "reset: 1 message",
    ):
        assert f"ok           {part}" in checked.out
    assert "tool look: look(query='b', pages=[2], exact=True) gave 'a page'" in checked.out
    assert "tool count: count(n=2) gave '2'" in checked.out
    assert "reward: 1 for '42' after 2 other turns, 0 for an empty answer" in checked.out
    assert "on_truncated: 0.5 for an answer that was cut off" in checked.out
    assert "recovery: snapshot: a fresh environment goes on after turn 2, with 10 bytes of JSON" in checked.out
    assert re.search(r"  content +4  why\?", checked.out)
    assert re.search(r'template .*"name": "look"', checked.out)
    assert re.search(r"control .*<\|im_start\|>", checked.out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guess_number", "arithmetic"])
def test_the_recipes_of_the_repository_are_all_ok(
    name: str, models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one whose model has to be fetched is looked at with another."""
    folder = Path(__file__).parents[2] / "envs" / name
    recipe = (folder / "recipe.toml").read_text()
    if name == "arithmetic":
        recipe = recipe.replace('source = "env.py:build_model"', f'path = "{models("json tags")}"')
    (tmp_path / "env.py").write_text((folder / "env.py").read_text())
    (tmp_path / "recipe.toml").write_text(recipe)
    code = main(["check", str(tmp_path / "recipe.toml")])
    checked = Checked(code, capsys.readouterr().out, "", 0)
    assert (code, checked.findings("wrong"), checked.findings("warning")) == (0, [], [])


SCRIPT = """
import asyncrl as rl
from env import Talk, rows

policy = rl.Policy(rl.TorchLearner("{model}"))
engine = rl.RolloutEngine(policy, env={env}, budget=rl.Budget(max_generated_tokens=100))
trainer = rl.AsyncTrainer(engine=engine, optimizer=rl.Adam(lr=1.0), groups_per_step=1, max_staleness=0)
rl.run(trainer, rows(), steps=1)
raise AssertionError("it was run")
"""


@pytest.mark.slow
@pytest.mark.parametrize("env", ["Talk", "Talk()"])
def test_a_script_is_checked_as_a_recipe_is(
    check: Check,
    models: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    env: str,
) -> None:
    """It runs up to ``rl.run``. An environment that all trajectories share is not closed."""
    monkeypatch.delitem(sys.modules, "env", raising=False)
    check(reward="return 1 / len(row['answers'])", close="raise OSError('busy')")
    (tmp_path / "run.py").write_text(SCRIPT.format(model=models("json tags"), env=env))
    code = main(["check", str(tmp_path / "run.py")])
    captured = capsys.readouterr()
    checked = Checked(code, captured.out, captured.err, 0)
    assert "2 wrong" in checked.err if env == "Talk" else "1 wrong" in checked.err, captured
    parts = [fault.split(":")[0].split()[-1] for fault in checked.findings("wrong")]
    assert parts == (["close", "reward"] if env == "Talk" else ["reward"])
    monkeypatch.delitem(sys.modules, "env", raising=False)


FAULTS = {
    "init raises": (
        {"__init__": "raise RuntimeError('no licence')  # here"},
        "environment",
        "RuntimeError: no licence",
    ),
    "reset raises": ({"reset": "raise KeyError('question')  # here"}, "reset", "KeyError: 'question'"),
    "reset gives text": (
        {"reset": "# here\n        return 'why?'"},
        "reset",
        "the answer is 'why?', but must be a list",
    ),
    "reset gives nothing": ({"reset": "# here\n        return []"}, "reset", "at least 1 of them"),
    "reset gives a role": (
        {"reset": "# here\n        return [{'role': 'you', 'content': ''}]"},
        "reset",
        "one of system",
    ),
    "tool is wrong": ({"look": "return query.pages  # here"}, "tool look", "AttributeError: 'str' object has no"),
    "plain tool is wrong": ({"count": "return n + 'x'  # here"}, "tool count", "TypeError: unsupported operand"),
    "tool gives a number": (
        {"look": "# here\n        return 5"},
        "tool look",
        "tool 'look' returned is 5, but must be text",
    ),
    "on_turn raises": ({"on_turn": "raise KeyError('x')  # here"}, "on_turn", "KeyError: 'x'"),
    "on_turn gives text": (
        {"on_turn": "# here\n        return 'go on'"},
        "on_turn",
        "the answer is 'go on', but must be",
    ),
    "reward raises": ({"reward": "return 1 / len(row['answers'])  # here"}, "reward", "KeyError: 'answers'"),
    "reward gives nothing": ({"reward": "# here\n        pass"}, "reward", "the reward is None, but must be a number"),
    "reward gives text": (
        {"reward": "# here\n        return '1'"},
        "reward",
        "the reward is '1', but must be a number",
    ),
    "reward is not finite": ({"reward": "# here\n        return float('nan')"}, "reward", "must be a finite number"),
    "on_truncated raises": ({"on_truncated": "raise OSError('full')  # here"}, "on_truncated", "OSError: full"),
    "on_truncated is text": ({"on_truncated": "# here\n        return 'no'"}, "on_truncated", "must be a number"),
    "snapshot raises": ({"snapshot": "raise ValueError('open')  # here"}, "snapshot", "ValueError: open"),
    "snapshot is an object": (
        {"snapshot": "# here\n        return {'a': self}"},
        "snapshot",
        "but must be what JSON has",
    ),
    "restore raises": ({"restore": "self.said = state['lost']  # here"}, "restore", "KeyError: 'lost'"),
    "close raises": ({"close": "raise OSError('busy')  # here"}, "close", "OSError: busy"),
    "reset hangs": (
        {"reset": "# here\n        await anyio.sleep_forever()"},
        "reset",
        "ran past its deadline of 0.05 s",
    ),
    "tool hangs": (
        {"look": "# here\n        await anyio.sleep_forever()"},
        "tool look",
        "it has not ended after 0.05 s",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("bodies", "part", "cause"), FAULTS.values(), ids=FAULTS)
def test_a_broken_environment_is_told_with_cause_place_and_what_to_do(
    check: Check, bodies: dict[str, str], part: str, cause: str
) -> None:
    """In few lines, and once; the place is a line of the user's own, or the function that gave the value."""
    checked = check(*(["--timeout", "0.05"] if any("sleep" in body for body in bodies.values()) else []), **bodies)
    assert checked.code == 2
    faults = checked.findings("wrong")
    assert len(faults) == 1, checked.out
    [fault] = faults
    assert fault.startswith(f"wrong        {part}: ")
    assert cause in fault
    places = [int(place) for place in re.findall(r'env\.py(?:", line |:)(\d+)', fault)]
    assert places and min(abs(place - checked.line) for place in places) <= 3, fault
    assert "  -> " in fault
    assert len(fault.splitlines()) <= 15
    assert "asyncrl/" not in fault
    assert "1 wrong, see above" in checked.err


@pytest.mark.slow
def test_what_holds_the_event_loop_is_interrupted_and_named(check: Check) -> None:
    """No deadline of the loop's can end it."""
    checked = check("--timeout", "0.1", reset="time.sleep(60)  # here")
    assert checked.code == 2
    [fault] = checked.findings("wrong")
    assert "reset" in fault
    assert f"env.py:{checked.line} in Talk.reset" in fault


@pytest.mark.slow
def test_a_thread_that_hangs_is_told_and_left(check: Check) -> None:
    """The command does not wait for it."""
    checked = check("--timeout", "0.05", reward="time.sleep(0.5)\n        return 1.0")
    assert checked.code == 2
    assert "Talk.reward ran past its deadline of 0.05 s" in checked.out
    assert "1 wrong, see above" in checked.err


@pytest.mark.slow
def test_several_faults_are_told_at_once(check: Check) -> None:
    """One that depends on no other does not hide it."""
    checked = check(reward="raise KeyError('a')", close="raise KeyError('b')", look="return None.x")
    parts = [fault.split(":")[0].split()[-1] for fault in checked.findings("wrong")]
    assert sorted(parts) == ["close", "look", "reward"]
    assert "3 wrong, see above" in checked.err


WARNINGS = {
    "a tool refuses its arguments": (
        {"look": "raise ValueError('no such page')"},
        "tool look: ValueError: no such page",
    ),
    "a tool without words": ({"undocumented": "yes"}, "tools: look has no docstring"),
    "a tool is not reached": (
        {"on_turn": "return None"},
        "tool look: the call look(query='b', pages=[2], exact=True) did not reach it",
    ),
    "the reward is always equal": ({"reward": "return 0.5"}, "reward: 0.5 for an empty answer and for '42' after"),
    "the reward is a bool": ({"reward": "return bool(traj.final_text)"}, "reward: it returned False (bool)"),
    "the row is changed": (
        {"reset": "row['question'] += '!'\n        return [{'role': 'user', 'content': '?'}]"},
        "reset: reset changes the row",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("bodies", "text"), WARNINGS.values(), ids=WARNINGS)
def test_what_may_be_meant_is_a_warning(check: Check, bodies: dict[str, str], text: str) -> None:
    """With what to do; the check passes."""
    checked = check(**bodies)
    assert checked.code == 0, checked.out
    assert any(text in warning for warning in checked.findings("warning")), checked.out


RECIPES = {
    "unknown key": ("lr = 1e-3", "learning_rate = 1e-3", "optimizer: unknown key 'learning_rate'"),
    "missing key": ("groups_per_step = 1", "", "trainer.groups_per_step"),
    "wrong type": ("steps = 1", "steps = 'many'", "trainer.steps is 'many'"),
    "out of range": ("lr = 1e-3", "lr = -1.0", "lr is -1.0"),
    "no such file": ("env.py:Talk", "emv.py:Talk", "there is no file"),
    "no such name": ("env.py:Talk", "env.py:Tal", "did you mean 'Talk'?"),
    "no such rows": ("env.py:rows", "env.py:row", "did you mean 'rows'?"),
    "no such model": ("{model}", "{model}l", "did you mean 'model'?"),
    "no such environment option": ("[data]", "depth = 3\n[data]", "depth"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "text"), RECIPES.values(), ids=RECIPES)
def test_a_broken_recipe_is_told_by_its_key(check: Check, old: str, new: str, text: str) -> None:
    """As a run would refuse it."""
    checked = check(recipe=RECIPE.replace(old, new))
    assert checked.code == 2
    assert text in checked.out + checked.err
    assert all(len(fault.splitlines()) <= 15 for fault in checked.findings("wrong"))


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_told_with_its_line(check: Check) -> None:
    """As often as it is referred to."""
    checked = check(code="import asyncrl as rl\nTalk = rl.Emv  # here\n")
    assert checked.code == 2
    assert f"env.py:{checked.line}" in checked.findings("wrong")[0] or f"line {checked.line}" in checked.out


@pytest.mark.slow
def test_a_template_that_ignores_tools_is_wrong_unless_somebody_tells_the_model(check: Check) -> None:
    """The option that helps is named, and works."""
    checked = check(family="no announcement")
    assert checked.code == 2
    [fault] = checked.findings("wrong")
    assert "look, count: the chat template does not tell the model of them" in fault
    assert "rollout.announce_tools" in fault
    for choice in ("text", "none"):
        checked = check("--set", f"rollout.announce_tools={choice}", family="no announcement")
        assert checked.code == 0, checked.out
        assert ("You can call these tools." in checked.out) == (choice == "text")


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_told(check: Check) -> None:
    """It is wrong if nothing fits behind it, and a warning if less does than the budget says."""
    checked = check("--set", "budget.max_context_tokens=100")
    assert any("prompt: " in fault and "has room for 100" in fault for fault in checked.findings("wrong"))
    checked = check("--set", "budget.max_generated_tokens=5000")
    assert checked.code == 0
    assert any("set budget.max_generated_tokens to at most" in warning for warning in checked.findings("warning"))


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_and_a_server_that_does_not_answer_are_told(
    check: Check, tmp_path: Path
) -> None:
    """Both cost nothing to see; the port is one on which nobody listens."""
    (tmp_path / "file").write_text("")
    server = 'sampler.urls=["http://127.0.0.1:9"]'
    checked = check(
        "--set", f"run.directory={tmp_path / 'file' / 'runs'}", "--set", "sampler.backend=sglang", "--set", server
    )
    assert checked.code == 2
    faults = "".join(checked.findings("wrong"))
    assert "run.directory: " in faults and "file cannot be written" in faults
    assert "http://127.0.0.1:9 takes no connection" in faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bodies", "text"),
    [
        ({"__init__": "raise RuntimeError('no licence')  # here"}, "RuntimeError: no licence"),
        ({"reset": "raise KeyError('question')  # here"}, "KeyError: 'question'"),
        ({"reset": "# here\n        return 'why?'"}, "the answer is 'why?'"),
    ],
)
def test_a_run_refuses_an_environment_that_does_not_begin(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str], bodies: dict[str, str], text: str
) -> None:
    """Before anything is loaded, with the place and the command that says more."""
    line = check(**bodies).line
    assert main(["train", str(tmp_path / "recipe.toml")]) == 2
    err = capsys.readouterr().err
    assert text in err and "asyncrl check" in err
    assert any(f"env.py:{near}" in err for near in range(line - 3, line + 1))
    assert not (tmp_path / "runs").exists()
