"""The files of a run directory: whole or not there, as small as what is new, and readable after any of it was cut."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import numpy as np
import orjson
import pytest

from asyncrl.checkpoint import trajectories as store
from asyncrl.checkpoint.directory import write_configuration
from asyncrl.checkpoint.fingerprint import rows_digest
from asyncrl.checkpoint.journal import Journal
from asyncrl.checkpoint.snapshots import Snapshots
from asyncrl.checkpoint.state import Consumed, GroupState, JournalEntry, RunState
from asyncrl.checkpoint.trajectories import frozen, read_trajectory
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.events import EvaluationFinished, Events, Notice, StepFinished
from asyncrl.files import locked
from asyncrl.learning.base import TrainingSequence, Update
from asyncrl.observe.sinks import last_logged_step, read_results, write_events
from asyncrl.rollout.progress import GroupProgress
from asyncrl.types import DropReason, Group, Span, SpanKind, StopReason, ToolCall, Trajectory, TruncationCause


def _span(tokens: int, version: int = 3) -> Span:
    ids = np.arange(tokens, dtype=np.int32)
    return Span(kind=SpanKind.GENERATED, tokens=ids, logprobs=(-ids / 7).astype(np.float32), version=version)


def _trajectory(group: int = 0, member: int = 0, tokens: int = 5) -> Trajectory:
    traj = Trajectory(id=f"{group:06d}-{member:03d}", group=group, member=member, row=group, seed=77)
    traj.append(Span(kind=SpanKind.PROMPT, tokens=np.array([9, 8], dtype=np.int32)))
    traj.append(_span(tokens))
    traj.messages += [{"role": "user", "content": "été"}, {"role": "assistant", "content": ""}]
    return traj


def _state(*groups: GroupState, n: int = 0) -> RunState:
    return RunState(n=n, version=n, admitted=len(groups), groups={group.index: group for group in groups})


def _active(*members: Trajectory, group: int = 0) -> GroupState:
    return GroupState(index=group, due=4, progress=GroupProgress(active={traj.member: traj for traj in members}))


def _save(folder: Path, state: RunState) -> None:
    with closing(Snapshots(folder)) as snapshots:
        snapshots.write(state)


def _read(folder: Path) -> RunState:
    state = Snapshots(folder).read(lambda group: group)
    assert state is not None
    return state


def _same(left: Trajectory, right: Trajectory) -> None:
    for field in fields(Trajectory):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if field.name == "spans":
            for span, other in zip(ours, theirs, strict=True):
                assert (span.kind, span.version) == (other.kind, other.version)
                assert np.array_equal(span.tokens, other.tokens)
                assert (span.logprobs is None) == (other.logprobs is None)
                assert span.logprobs is None or np.array_equal(span.logprobs, other.logprobs)
        elif field.name == "error":
            assert (ours is None) == (theirs is None)
        else:
            assert ours == theirs, field.name


def test_every_field_of_a_trajectory_comes_back(tmp_path: Path) -> None:
    """With its type and to the last bit; an error comes back as its text."""
    traj = _trajectory()
    traj.turns, traj.turn_tokens, traj.segments, traj.empty_aborts, traj.attempt = 2, 3, 4, 5, 6
    traj.version, traj.anchor, traj.turn_cap = 3, 2, 64
    traj.stop, traj.truncated, traj.dropped = StopReason.LENGTH, TruncationCause.TURNS, DropReason.FAILED
    traj.cut = traj.awaiting_reply = traj.over = True
    traj.tool_calls = [ToolCall(name="search", arguments={"q": ["a", 1]}, id="7"), ToolCall(name="", arguments=None)]
    traj.tool_failures = [("search", "KeyError: 'q'", "env.py:3 in Env.search")]
    traj.reward, traj.error = 0.1 + 0.2, KeyError("gone")
    traj.metrics, traj.seconds = {"tool_calls": 1.0}, {"sampling": 1 / 3}
    traj.server = "http://a"
    traj.env_state = b'{"said":[1,2]}'
    _save(tmp_path, _state(_active(traj)))
    progress = _read(tmp_path).groups[0].progress
    assert progress is not None
    _same(progress.active[0], traj)
    assert str(progress.active[0].error) == "KeyError: 'gone'"
    unset = {field.name for field in fields(Trajectory) if getattr(traj, field.name) in (0, None, False, "", [], {})}
    assert unset <= {"group", "member", "row"}, "a new field needs a value here"


def test_a_number_that_json_does_not_have_comes_back_as_nan(tmp_path: Path) -> None:
    """An environment may report anything."""
    traj = _trajectory()
    traj.metrics["odd"] = math.inf
    _save(tmp_path, _state(_active(traj)))
    progress = _read(tmp_path).groups[0].progress
    assert progress is not None
    assert math.isnan(progress.active[0].metrics["odd"])


def test_groups_come_back_with_their_parts_and_progress(tmp_path: Path) -> None:
    """A part that is ready, and members that have ended, were removed, failed, or passed a quorum."""
    part = Group(index=0, row=0, members_G=[_trajectory(0, 1)], seconds=1.5, final=False, last_member=1)
    failed = _trajectory(0, 3)
    failed.error = KeyError("x")
    progress = GroupProgress(
        active={2: _trajectory(0, 2)},
        ended=[failed],
        removed={1},
        attempts=Counter({2: 3}),
        retries=Counter({2: 1}),
        rerolls=1,
        at_quorum={2: 5},
        deadline_passed=True,
        part_handed_over=True,
        failure=KeyError("y"),
        seconds=2.5,
    )
    state = _state(GroupState(index=0, due=7, taken={0}, parts=[part], progress=progress), n=3)
    state.totals.dropped[DropReason.FAILED] = 2
    state.sums, state.rollout_keys, state.dropped = {"train/updated": 1.0}, ("rollout/won",), 2
    _save(tmp_path, state)
    read = _read(tmp_path)
    group = read.groups[0]
    assert (read.n, read.sums, read.rollout_keys, read.dropped) == (3, state.sums, state.rollout_keys, 2)
    assert read.totals.dropped == Counter({"failed": 2})
    assert (group.due, group.taken, group.is_begun, group.is_finished) == (7, {0}, True, False)
    assert (group.parts[0].seconds, group.parts[0].final, group.parts[0].last_member) == (1.5, False, 1)
    _same(group.parts[0].members_G[0], part.members_G[0])
    assert group.progress is not None
    for field in fields(GroupProgress):
        if field.name not in ("active", "ended", "failure", "started"):
            assert getattr(group.progress, field.name) == getattr(progress, field.name), field.name
    errors = (group.progress.ended[0].error, group.progress.failure)
    assert [str(error) for error in errors] == ["KeyError: 'x'", "KeyError: 'y'"]


def test_a_save_writes_only_what_is_new(tmp_path: Path) -> None:
    """Token data grows by what was sampled since, in this process and the one that resumes."""
    traj = _trajectory(tokens=1000)
    snapshots = Snapshots(tmp_path)

    def size() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("tokens-*.bin"))

    snapshots.write(_state(_active(frozen(traj))))
    first = size()
    snapshots.write(_state(_active(frozen(traj))))
    assert size() == first
    traj.append(_span(10))
    snapshots.write(_state(_active(frozen(traj))))
    assert size() == first + 80
    snapshots.close()
    with closing(Snapshots(tmp_path)) as later:
        read = later.read(lambda group: group)
        assert read is not None
        later.write(read)
    assert size() == first + 80


def test_tokens_that_nobody_needs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of consumed groups go; one with little left is given up; what is left still reads."""
    monkeypatch.setattr(store, "_SHARD_BYTES", 10_000)
    snapshots = Snapshots(tmp_path)
    slow = _trajectory(0, 0, tokens=30)
    for step in range(12):
        quick = [_trajectory(1, member, tokens=400) for member in range(4)]
        snapshots.write(_state(_active(frozen(slow)), _active(*quick, group=1), n=step))
    snapshots.close()
    assert len(list(tmp_path.glob("tokens-*.bin"))) <= 4
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    progress = _read(tmp_path).groups[0].progress
    assert progress is not None
    _same(progress.active[0], slow)


@pytest.mark.parametrize("damage", ["cut", "garbage", "no tokens"])
def test_a_damaged_snapshot_gives_way_to_the_one_before(tmp_path: Path, damage: str) -> None:
    """A file that is not complete does not count; if none is, that is an error and no fresh start."""
    snapshots = Snapshots(tmp_path)
    snapshots.write(_state(_active(_trajectory()), n=1))
    snapshots.write(_state(_active(_trajectory(0, 1)), n=2))
    snapshots.close()
    newest = tmp_path / "000002.jsonl"
    if damage == "no tokens":
        shard = tmp_path / "tokens-000001.bin"
        shard.write_bytes(shard.read_bytes()[:-8])
    else:
        content = newest.read_bytes()
        newest.write_bytes(content[: len(content) // 2] if damage == "cut" else b"{]\n")
    assert _read(tmp_path).n == 1
    (tmp_path / "000001.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"000002\.jsonl|tokens-000001"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("content", "read"),
    [(2**64, 2**64), ("caf\udce9", "caf\ufffd"), (math.inf, None), ((1, 2), [1, 2]), ({(1, 2): 3}, {"(1, 2)": 3})],
)
def test_what_json_cannot_hold_does_not_make_a_save_fail(tmp_path: Path, content: object, read: object) -> None:
    """An environment may write anything into its messages at any moment; what can be read back is as near as can be."""
    traj = _trajectory()
    traj.messages.append({"role": "user", "content": content, "other": object()})
    traj.tool_calls = [ToolCall(name="f", arguments={"n": content, "big": 10**23})]
    traj.metrics = {"odd": object(), "one": np.float32(1)}  # type: ignore[dict-item]
    _save(tmp_path, _state(_active(traj)))
    progress = _read(tmp_path).groups[0].progress
    assert progress is not None
    [again] = progress.active.values()
    assert again.messages[-1]["content"] == read
    assert again.messages[-1]["other"].startswith("<object")
    assert again.tool_calls[0].arguments == {"n": read, "big": 10**23}
    assert again.metrics == {"one": 1.0}


@pytest.mark.parametrize("odd", ["correct", [1, 2], {"a": 1}, True, 10**400])
def test_odd_metrics_that_an_older_process_saved_are_read(odd: object) -> None:
    """A state on disk is never the reason why a mended environment cannot go on."""
    head = {"id": "0", "group": 0, "member": 0, "seed": 0, "metrics": {"odd": odd, "lost": None, "kept": 1.5}}
    metrics = read_trajectory(head, {}, [], []).metrics
    assert metrics.pop("odd", 1.0) == 1.0
    assert math.isnan(metrics["lost"])
    assert metrics["kept"] == 1.5


def _entry(n: int = 1) -> JournalEntry:
    consumed = (Consumed(group=4, members=(0, 2), final=False),)
    return JournalEntry(
        n=n, version=n - 1, admitted=9, consumed=consumed, dropped=((3, "failed"),), dropped_members={"truncated": 1}
    )


def test_a_step_without_gradient_is_in_the_journal(tmp_path: Path) -> None:
    """It consumed rows and made no version."""
    journal = Journal(tmp_path, tmp_path / "refused")
    journal.draft(_entry())
    assert journal.steps() == []
    journal.commit(1)
    read = journal.read(1)
    assert (read.version, read.version_after, read.updates) == (0, 0, [])
    assert (read.consumed, read.dropped, read.dropped_members) == (
        _entry().consumed,
        ((3, "failed"),),
        {"truncated": 1},
    )


def test_a_journal_of_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not damaged, and the message says how to go on."""
    writer = Journal(tmp_path, tmp_path / "refused")
    with monkeypatch.context() as patch:
        patch.setattr("asyncrl.checkpoint.journal._FORMAT", "2")
        writer.draft(_entry())
        writer.commit(1)
    with pytest.raises(CheckpointError, match="format '2', which another release of asyncrl wrote"):
        writer.read(1)


def test_sequences_come_back_to_the_last_bit(tmp_path: Path) -> None:
    """In their chunks; advantages and weights are float64."""
    journal = Journal(tmp_path, tmp_path / "refused")
    draw = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            tokens=draw.integers(0, 99, length).astype(np.int32),
            logprobs=draw.random(length).astype(np.float32),
            mask=draw.random(length) < 0.5,
            ages=draw.integers(0, 3, length).astype(np.int32),
            advantage=float(draw.random()) / 3,
            weight=1 / length,
            temperature=0.7,
        )
        for length in (3, 5, 2)
    ]
    updates = [Update(chunks=[sequences[:2], sequences[2:]]), Update(chunks=[sequences[1::-1]], divisor=7.3)]
    entry = JournalEntry(n=1, version=0, admitted=1, consumed=(), updates=updates)
    journal.draft(entry)
    journal.commit(1)
    (first, second) = journal.read(1).updates
    assert (first.divisor, second.divisor) == (1.0, 7.3)
    chunks = first.chunks
    assert [len(chunk) for chunk in chunks] == [2, 1]
    assert list(second.chunks[0]) == chunks[0][::-1], "the same objects again, and on disk only once"
    for ours, theirs in zip(sequences, [*chunks[0], *chunks[1]], strict=True):
        for name in ("tokens", "logprobs", "mask", "ages"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        for name in ("advantage", "weight", "temperature"):
            assert getattr(ours, name) == getattr(theirs, name)


def test_a_gap_in_the_journal_is_an_error() -> None:
    """Steps are applied one after the other."""
    with pytest.raises(CheckpointError, match="goes on with step 3 at version 2, but the saved state is after step 0"):
        RunState().apply(_entry(3))


def test_rows_are_told_apart() -> None:
    """By content and order; what JSON does not have counts by its type, and not by its address."""
    assert rows_digest([{"a": 1}, {"a": 2}]) != rows_digest([{"a": 2}, {"a": 1}])
    assert rows_digest([object()]) == rows_digest([object()])
    assert rows_digest([np.arange(3)]) != rows_digest([np.arange(4)])


def _deep(value: object, levels: int) -> object:
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2**64, 2**64 + 1),
        (-(2**70), 2**70),
        (10**5000, 10**5000 + 1),
        ({(1, 2): 3}, {(1, 3): 3}),
        ({(1, 2): 3, (0,): 1}, {(1, 2): 1, (0,): 3}),
        ("caf\udce9", "caf\udce8"),
        (["ab\udce9", "c"], ["ab", "\udce9c"]),
        ([["\udce9"], 1], [["\udce9", 1]]),
        (_deep(1, 5000), _deep(2, 5000)),
        (_deep(1, 5000), _deep(1, 5001)),
        ({"big": 2**64, "array": np.arange(3)}, {"big": 2**64, "array": np.arange(1, 4)}),
        ({"big": 2**64, "float": 0.1}, {"big": 2**64, "float": 0.2}),
    ],
    ids=range(12),
)
def test_rows_that_json_does_not_have_are_told_apart_too(one: object, other: object) -> None:
    """And the same rows are the same, whatever the order in which a dict was filled."""
    assert rows_digest([one]) != rows_digest([other])
    assert rows_digest([one, other]) != rows_digest([other, one])
    same = dict(reversed(one.items())) if isinstance(one, dict) else one
    assert rows_digest([same]) == rows_digest([one])


def test_a_row_that_contains_itself_has_a_digest() -> None:
    """It ends, and is the same in every process."""
    row: dict[str, object] = {"big": 2**64}
    row["again"] = [row]
    other: dict[str, object] = {"big": 2**64}
    other["again"] = [other]
    assert rows_digest([row]) == rows_digest([other])


async def test_half_a_line_of_a_killed_process_is_taken_off(tmp_path: Path) -> None:
    """What follows is readable, and earlier results are read back."""
    line = orjson.dumps({"n": 1, "model_step": 1, "time": 0.5, "reward/mean": 0.25}) + b"\n"
    evaluation = orjson.dumps(
        {"event": "evaluation_finished", "time": 1.0, "version": 0, "metrics": {"reward_mean": 1.0}}
    )
    (tmp_path / "metrics.jsonl").write_bytes(line + b'{"n": 2, "mod')
    (tmp_path / "events.jsonl").write_bytes(evaluation + b"\n" + b"{" * 200_000)
    events = Events()
    async with write_events(tmp_path, events):
        events.emit(StepFinished(time=2.0, n=2, model_step=2, metrics={"reward/mean": 0.5}))
    results = list(read_results(tmp_path))
    assert [(event.n, event.metrics["reward/mean"]) for event in results if isinstance(event, StepFinished)] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert [event.metrics for event in results if isinstance(event, EvaluationFinished)] == [{"reward_mean": 1.0}]


def test_a_save_that_fails_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves half a record; what is saved later, when there is room again, is whole."""
    traj = _trajectory(tokens=1000)
    with closing(Snapshots(tmp_path)) as snapshots:
        snapshots.write(_state(_active(frozen(traj)), n=1))
        traj.append(_span(500))
        original = store.TokenStore._append

        def half(self: store.TokenStore, count: int, *pieces: bytes | memoryview) -> store.Stored:
            original(self, count, memoryview(pieces[0]).cast("B")[:10])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match=f"No space left.*{tmp_path}"):
            patch.setattr(store.TokenStore, "_append", half)
            snapshots.write(_state(_active(frozen(traj)), n=2))
        assert _read(tmp_path).n == 1
        snapshots.write(_state(_active(frozen(traj)), n=3))
    read = _read(tmp_path)
    assert read.n == 3
    progress = read.groups[0].progress
    assert progress is not None
    _same(progress.active[0], traj)


def _metrics_line(n: int, **values: object) -> bytes:
    line = {"n": n, "model_step": n, "time": float(n), "reward/mean": 0.5, **values}
    return orjson.dumps(line) + b"\n"


@pytest.mark.parametrize(
    "odd", [b"{]\n", b"\xff\n", b"7\n", b"[]\n", b"null\n", b"{}\n", b'{"n":2}\n', _metrics_line(2, note="text"), b"\n"]
)
def test_a_line_of_results_that_cannot_be_read_is_said_and_left_out(tmp_path: Path, odd: bytes) -> None:
    """The others count, null is a number that JSON does not have, and the half line at the end is none yet."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(_metrics_line(1, odd=None) + odd + _metrics_line(3) + b'{"n": 4')
    first, notice, last = read_results(tmp_path)
    assert isinstance(first, StepFinished)
    assert math.isnan(first.metrics["odd"])
    assert isinstance(last, StepFinished)
    assert (first.n, last.n) == (1, 3)
    assert isinstance(notice, Notice)
    assert (notice.name, notice.keys) == ("line_unreadable", {"path": str(path), "line": 2})
    assert last_logged_step(tmp_path) == (path, 3)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
async def test_a_folder_in_the_place_of_results_is_named(tmp_path: Path, name: str) -> None:
    """Reading and going on with them alike."""
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        list(read_results(tmp_path))
    with pytest.raises(CheckpointError, match=name):
        async with write_events(tmp_path, Events()):
            raise AssertionError("not begun")


def test_the_run_file_has_the_configuration_and_the_versions(tmp_path: Path) -> None:
    """What a person needs to repeat the run; no half-written file is left."""
    write_configuration(tmp_path, {"trainer": {"steps": 3}})
    content = orjson.loads((tmp_path / "run.json").read_bytes())
    assert content["configuration"] == {"trainer": {"steps": 3}}
    assert content["libraries"].keys() >= {"asyncrl", "torch", "transformers"}
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.slow
def test_a_lock_names_its_process_and_goes_with_it(tmp_path: Path) -> None:
    """However the process ends: nobody has to remove a file by hand after a kill."""
    script = """
import sys
from pathlib import Path
from asyncrl.files import locked
with locked(Path(sys.argv[1]), "option"):
    print(flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match=f"^option is .* \\(process {process.pid}\\)"), locked(tmp_path, "option"):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path, "option"):
            pass
