"""What becomes of a run when something happens to the files in its directory.

Every file is flipped at drawn places, cut, emptied, deleted, replaced by a folder; copies and strays are put beside it.
What is resumed then either comes to the parameters and accounts of an undamaged run, or ends with an error that names
the file. It never comes to other parameters.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.events import Notice, StepFinished
from asyncrl.files import read_json, write_json
from asyncrl.observe.sinks import encode_event
from tests.resume.runs import Life, Plan, consumed_rows, entries

# Without weights but the first ones, so that all of the journal is needed and is there; with newer ones; and with full
# weights, where the model's folder takes the place of the first ones.
PLANS = {
    "long journal": Plan(steps=4, weights_every=100, heldout=1),
    "newer weights": Plan(steps=5, weights_every=2),
}
STOPPED_S = {"long journal": 9.0, "newer weights": 9.5}
FLIPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A run that was stopped in the middle, and what it comes to if nothing happens to it."""

    plan: Plan
    directory: Path
    parameters: str
    steps: tuple[int, ...]
    """What is left of it."""

    @property
    def files(self) -> list[Path]:
        """All of it, but what a killed process leaves and nobody reads."""
        found = (path.relative_to(self.directory) for path in sorted(self.directory.rglob("*")) if path.is_file())
        return [path for path in found if path.name != ".lock"]


def _leave_results(life: Life, directory: Path) -> None:
    """The files of results, as the command writes them."""
    steps: list[StepFinished] = life.of(StepFinished)
    lines = [orjson.dumps({"n": step.n, "model_step": step.model_step, "time": step.time}) + b"\n" for step in steps]
    (directory / "metrics.jsonl").write_bytes(b"".join(lines))
    (directory / "events.jsonl").write_bytes(b"".join(encode_event(step) for step in steps))


@pytest.fixture(scope="module", params=PLANS)
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Made once; nobody changes it."""
    plan, directory = PLANS[request.param], tmp_path_factory.mktemp("run")
    life = Life(plan, directory)
    assert life.play(STOPPED_S[request.param]), "the run was over before"
    assert len(life.steps) >= 3
    _leave_results(life, directory)
    whole = Life(plan, None)
    whole.play()
    left = tuple(range(len(life.steps) + 1, plan.steps + 1))
    stopped = Stopped(plan=plan, directory=directory, parameters=whole.learner.parameters, steps=left)
    kinds = {path.parts[0] for path in stopped.files}
    assert kinds == {"run.json", "metrics.jsonl", "events.jsonl", "state", "weights", "journal"}
    assert sum(path.suffix == ".jsonl" for path in stopped.files if path.parts[0] == "state") == 2
    return stopped


def _resume(stopped: Stopped, directory: Path) -> tuple[Life, str]:
    """The resumed run, and the error that it ended with, if any."""
    life = Life(stopped.plan, directory)
    try:
        life.play()
    except (CheckpointError, ConfigError) as error:
        return life, str(error)
    return life, ""


def _judge(stopped: Stopped, directory: Path, damaged: Path, what: str) -> bool:
    """Fails unless the run is right or refused by name; True if it is right."""
    life, error = _resume(stopped, directory)
    if error:
        assert str(directory) in error, f"{what}: {error}"
        assert str(damaged) in error or not damaged.exists(), f"{what}: {error}"
        return False
    assert life.learner.parameters == stopped.parameters, what
    # A step that was not there may be made again; none is left out, and no row is consumed twice.
    assert {step.n for step in life.steps} >= set(stopped.steps), what
    consumed = consumed_rows(entries(directory))
    assert consumed == Counter(dict.fromkeys(consumed, 1)), what
    return True


def _flip(data: bytes, place: int, bit: int) -> bytes:
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


def _flips(path: Path) -> Mapping[str, bytes]:
    data = path.read_bytes()
    draw = random.Random(path.name)
    places = {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(FLIPS))}
    bits = {place: draw.randrange(8) for place in sorted(places)}
    return {f"bit {bit} of byte {place} flipped": _flip(data, place, bit) for place, bit in bits.items()}


@pytest.mark.slow
def test_a_flipped_bit_is_harmless_or_named(stopped: Stopped, tmp_path: Path) -> None:
    """In every file, at its first and last byte and at drawn ones. In what seals cover it is always noticed."""
    for file in stopped.files:
        for what, data in _flips(stopped.directory / file).items():
            copy = tmp_path / "run"
            shutil.copytree(stopped.directory, copy)
            (copy / file).write_bytes(data)
            _judge(stopped, copy, copy / file, f"{file}: {what}")
            shutil.rmtree(copy)


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.Random(path.name).randrange(1, len(data))])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inner").write_bytes(b"x")


def _null(path: Path) -> None:
    path.write_bytes(b"null")


def _twice(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "cut": _cut,
    "emptied": _empty,
    "deleted": Path.unlink,
    "a folder": _folder,
    "null": _null,
    "twice itself": _twice,
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_there_or_not_itself_is_harmless_or_named(stopped: Stopped, tmp_path: Path, damage: str) -> None:
    """Each file in turn."""
    for number, file in enumerate(stopped.files):
        copy = tmp_path / f"run{number}"
        shutil.copytree(stopped.directory, copy)
        DAMAGES[damage](copy / file)
        _judge(stopped, copy, copy / file, f"{file}: {damage}")


STRAYS = ("{stem} copy{suffix}", "{name}~", ".{name}.swp", "#{name}#", "{name}.bak", "0{name}", "-{name}", "٣{name}")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["a copy", "nothing", "a folder"])
def test_what_others_put_there_is_left_alone(stopped: Stopped, tmp_path: Path, content: str) -> None:
    """Copies, backups of editors and foreign files, beside every file and folder: the run is right, and they stay."""
    strays = []
    copy = tmp_path / "run"
    shutil.copytree(stopped.directory, copy)
    for path in [*(copy / file for file in stopped.files), *(path for path in copy.rglob("*") if path.is_dir())]:
        for pattern in (*STRAYS, "README", "000009", "v9", "tokens-1.bin", "1.safetensors"):
            stray = path.with_name(pattern.format(name=path.name, stem=path.stem, suffix=path.suffix))
            if stray.exists():
                continue
            strays.append(stray)
            if content == "a folder":
                stray.mkdir()
            elif content == "nothing" or path.is_dir():
                stray.touch()
            else:
                shutil.copy(path, stray)
    assert _judge(stopped, copy, copy, content)
    # Weights that are no longer needed go with their folder.
    assert [path for path in strays if not path.exists() and path.parent.parent.name != "weights"] == []


@pytest.mark.slow
def test_a_copy_under_the_name_of_another_is_harmless_or_named(stopped: Stopped, tmp_path: Path) -> None:
    """Every file in the place of every other of its folder, and of the one that would come next."""
    for file in stopped.files:
        kind = (stopped.directory / file).parent
        others = {path.name for path in kind.iterdir() if path.is_file() and path.suffix == file.suffix}
        digits = "".join(sign for sign in file.stem if sign.isdigit())
        if digits:
            others.add(file.name.replace(digits, f"{int(digits) + 1:06d}"))
        for name in sorted(others - {file.name, ".lock"}):
            copy = tmp_path / "run"
            shutil.copytree(stopped.directory, copy)
            shutil.copy(copy / file, (copy / file).with_name(name))
            _judge(stopped, copy, (copy / file).with_name(name), f"{file} as {name}")
            shutil.rmtree(copy)


@pytest.mark.slow
def test_files_of_another_run_are_named_and_never_used(
    stopped: Stopped, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whole files under the right names, from a directory of the same options: only the run's own name tells."""
    foreign = tmp_path_factory.mktemp("foreign")
    other = Life(replace(stopped.plan, flat_rows=frozenset({0, 1, 2})), foreign)
    assert other.play(STOPPED_S["long journal" if stopped.plan.weights_every == 100 else "newer weights"])
    shared = [file for file in stopped.files if (foreign / file).exists() and file.name != "evaluated.json"]
    assert {file.parts[0] for file in shared} >= {"run.json", "weights"}
    for number, file in enumerate(shared):
        copy = tmp_path / f"run{number}"
        shutil.copytree(stopped.directory, copy)
        shutil.copy(foreign / file, copy / file)
        _judge(
            stopped, copy, copy if file.name in ("run.json", "about.json") else copy / file, f"{file} of another run"
        )
    copy = tmp_path / "weights"
    shutil.copytree(stopped.directory, copy)
    shutil.rmtree(copy / "weights")
    shutil.copytree(foreign / "weights", copy / "weights")
    assert not _judge(stopped, copy, copy, "weights of another run")


@pytest.mark.parametrize("gone", [("state",), ("weights",), ("journal",), ("state", "journal"), ("state", "weights")])
def test_a_folder_that_is_gone_is_made_up_for_or_named(stopped: Stopped, tmp_path: Path, gone: tuple[str, ...]) -> None:
    """The journal alone has all steps, if it is whole; nothing else does."""
    copy = tmp_path / "run"
    shutil.copytree(stopped.directory, copy)
    for name in gone:
        shutil.rmtree(copy / name)
    right = _judge(stopped, copy, copy, str(gone))
    assert right == (gone == ("state",) and stopped.plan.weights_every == 100)


@pytest.mark.parametrize("left", ["run.json", "metrics.jsonl", "events.jsonl"])
def test_nothing_begins_again_without_a_word(stopped: Stopped, tmp_path: Path, left: str) -> None:
    """Each of the files that tell of committed steps is enough to know that there was a run."""
    shutil.copy(stopped.directory / left, tmp_path / left)
    life, error = _resume(stopped, tmp_path)
    assert str(tmp_path / left) in error
    assert life.steps == []
    assert life.sampler.requests == []
    (tmp_path / left).unlink()
    fresh, error = _resume(stopped, tmp_path)
    assert (error, fresh.learner.parameters) == ("", stopped.parameters)


@pytest.mark.parametrize("last", [1, 2])
def test_steps_that_were_told_are_not_made_again_without_a_word(stopped: Stopped, tmp_path: Path, last: int) -> None:
    """A journal without its end looks like a run that was killed earlier; the results say that it was not."""
    copy = tmp_path / "run"
    shutil.copytree(stopped.directory, copy)
    shutil.rmtree(copy / "state")
    for path in (copy / "journal").iterdir():
        if int(path.stem) > last:
            path.unlink()
    _, error = _resume(stopped, copy)
    assert str(copy) in error
    if stopped.plan.weights_every == 100:
        assert f"end with step {last}" in error
        (copy / "metrics.jsonl").unlink()
        (copy / "events.jsonl").unlink()
        life, error = _resume(stopped, copy)
        assert (error, life.steps[0].n, life.learner.parameters) == ("", last + 1, stopped.parameters)


@pytest.mark.parametrize("loses", ["all of it", "its plan"])
def test_the_same_run_check_is_never_skipped(stopped: Stopped, tmp_path: Path, loses: str) -> None:
    """State without the file that says which run it is of is refused, whatever the options are."""
    copy = tmp_path / "run"
    shutil.copytree(stopped.directory, copy)
    path = copy / "run.json"
    if loses == "all of it":
        path.unlink()
    else:
        write_json(path, {"configuration": {}})
    for plan in (stopped.plan, replace(stopped.plan, groups_per_step=3)):
        _, error = _resume(replace(stopped, plan=plan), copy)
        assert str(path) in error
        assert "use another folder" in error


@pytest.mark.parametrize("kept", ["nothing", "run.json", "weights"])
def test_an_adapter_that_nothing_was_done_with_binds_nobody(tmp_path: Path, kept: str) -> None:
    """A run that was killed before its first step left a random adapter: another run begins with one of its own."""
    plan = Plan(steps=2, weights_every=100)
    first = Life(plan, tmp_path)
    first.learner._loaded = "drawn by the first"
    assert first.play(0.1)
    shutil.rmtree(tmp_path / "state")
    if kept == "weights":
        (tmp_path / "run.json").unlink()
    elif kept == "nothing":
        shutil.rmtree(tmp_path / "weights")
    changed = replace(plan, group_size=3)
    expected = Life(changed, None)
    expected.play()
    other = Life(changed, tmp_path)
    other.play()
    assert other.learner.parameters == expected.learner.parameters


def test_a_damaged_newest_snapshot_is_said(stopped: Stopped, tmp_path: Path) -> None:
    """The run goes on from the one before, and a notice has the path and the reason."""
    copy = tmp_path / "run"
    shutil.copytree(stopped.directory, copy)
    newest = max((copy / "state").glob("0*.jsonl"))
    _cut(newest)
    assert _judge(stopped, copy, newest, "cut")
    again = tmp_path / "again"
    shutil.copytree(stopped.directory, again)
    newest = max((again / "state").glob("0*.jsonl"))
    _cut(newest)
    life, _ = _resume(stopped, again)
    [notice] = [notice for notice in life.of(Notice) if notice.name == "snapshot_damaged"]
    assert str(newest) in str(notice.keys["reason"])
    assert notice.level == "warning"


def test_damaged_newest_weights_give_way_to_older_ones(tmp_path: Path) -> None:
    """If the journal leads on from there: a kill between two saves leaves both. A notice names what is damaged."""
    plan = Plan(steps=4, weights_every=100)
    life = Life(plan, tmp_path)
    assert life.play(7.0)
    other = tmp_path / "other"
    other.mkdir()
    write_json(other / "run.json", {"run": read_json(tmp_path / "run.json")["run"]})
    second = Life(replace(plan, weights_every=2), other)
    assert second.play(7.0)
    newest = tmp_path / "weights" / "v000002"
    shutil.copytree(other / "weights" / "v000002", newest)
    (newest / "scripted.json").write_bytes(_flip((newest / "scripted.json").read_bytes(), 30, 1))
    resumed = Life(plan, tmp_path)
    resumed.play()
    whole = Life(plan, None)
    whole.play()
    assert resumed.learner.parameters == whole.learner.parameters
    [notice] = [notice for notice in resumed.of(Notice) if notice.name == "weights_damaged"]
    assert str(newest / "scripted.json") in str(notice.keys["reason"])


def test_a_sealed_file_is_json_for_everybody(stopped: Stopped) -> None:
    """The checksum is a field like any other."""
    path = stopped.directory / "run.json"
    plain = orjson.loads(path.read_bytes())
    assert read_json(path) == {key: value for key, value in plain.items() if key != "crc32"}
