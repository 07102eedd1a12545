"""The files of what was said: whole, bounded, readable, and written off the event loop."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.events import Event, Events, Notice, RolloutsFinished
from asyncrl.observe import rollouts as module
from asyncrl.observe.kept import KeptRollouts
from asyncrl.observe.rolloutlines import encode_rollouts
from asyncrl.observe.rollouts import RolloutFile, read_rollouts, write_rollouts
from asyncrl.testing import ByteRenderer, ScriptedSampler, scripted_policy
from asyncrl.training.trainer import AsyncTrainer
from asyncrl.types import Group, Message, Row, Segment, Span, SpanKind, StopReason, Trajectory, VersionSpan

pytestmark = pytest.mark.usefixtures("blocking_calls_are_errors")

ALL = KeptRollouts(rollouts="all")


class Unkind:
    """Raises whenever it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __getattribute__(self, name: str) -> Any:
        raise LookupError("no")


@dataclasses.dataclass
class Puzzle:
    """A row of somebody's own."""

    question: str
    answers: set[int]


def _own_tail() -> list[Any]:
    loop: list[Any] = []
    loop += [loop, loop, {"again": loop}]
    return loop


ODD: list[Any] = [
    b"\xff\x00",
    {1, 2},
    np.float32(1.5),
    np.arange(6).reshape(2, 3),
    np.arange(6).reshape(2, 3).T,
    np.zeros((300, 300), dtype=np.float64),
    np.array(["a", object()], dtype=object),
    "\ud800 alone",
    math.nan,
    -math.inf,
    10**30,
    10**5000,
    object(),
    Unkind(),
    Puzzle("why", {1}),
    _own_tail(),
    ["deep"] and __import__("functools").reduce(lambda inner, _: [inner], range(500), 0),
    {(1, 2): "a key of its own", None: 1, 2.5: "x", "\udfff": 3},
    {"nested": [{"bytes": b"x" * 10, "set": {frozenset()}}]},
    "long " * 200_000,
    list(range(150_000)),
    lambda: None,
]
ODDITIES = st.integers(0, len(ODD) - 1).map(lambda index: ODD[index])
# By number: Hypothesis shows what it samples from, and some of these cannot be shown.
TEXTS = st.text() | st.text(st.characters(categories=["Cs", "Cc", "Lo", "Ll"])) | st.just('"\\\n' * 20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary() | ODDITIES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=6,
)


def _traj(group: int = 0, member: int = 0, *, reward: float | None = 0.0, **values: Any) -> Trajectory:
    plain: dict[str, Any] = {"row": "row", "seed": 1, **values}
    traj = Trajectory(id=f"{group:06d}-{member:03d}", group=group, member=member, reward=reward, **plain)
    if not traj.messages:
        traj.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    return traj


def _batch(*groups: Sequence[Trajectory], n: int = 1, version: int = 0, evaluation: str = "") -> RolloutsFinished:
    made = [Group(index=each[0].group, row=each[0].row, members_G=each, seconds=1.0) for each in groups]
    return RolloutsFinished(time=0.0, n=n, version=version, groups=made, evaluation=evaluation)


def _lines(event: RolloutsFinished, options: KeptRollouts = ALL) -> list[dict[str, Any]]:
    encoded = encode_rollouts(event, options)
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in encoded)
    return [json.loads(line) for line in encoded]


async def _files(directory: Path, **which: Any) -> list[RolloutFile]:
    return await anyio.to_thread.run_sync(lambda: list(read_rollouts(directory, **which)))


def test_a_line_says_what_was_said_and_by_which_versions() -> None:
    """Each segment with its age, which is that of its version when it was trained."""
    traj = _traj(3, 1, reward=0.5, metrics={"correct": 1.0}, seconds={"sampling": 2.0}, turns=2, row={"question": "?"})
    traj.append(Span(kind=SpanKind.PROMPT, tokens=np.array([1, 2], dtype=np.int32)))
    spans = (VersionSpan(version=4, start=0, end=1), VersionSpan(version=6, start=1, end=3))
    logprobs = np.array([-0.1, -0.2, -0.3], dtype=np.float32)
    traj.append_segment(
        Segment(tokens=np.array([7, 8, 9], dtype=np.int32), logprobs=logprobs, versions=spans, stop=StopReason.STOP)
    )
    [line] = _lines(_batch([traj], n=7, version=6), KeptRollouts(rollout_tokens=True))
    assert {key: line[key] for key in ("n", "version", "evaluation", "group", "member", "attempt", "id")} == {
        "n": 7,
        "version": 6,
        "evaluation": "",
        "group": 3,
        "member": 1,
        "attempt": 1,
        "id": "000003-001",
    }
    assert line["segments"] == [{"version": 4, "age": 2, "tokens": 1}, {"version": 6, "age": 0, "tokens": 2}]
    assert (line["row"], line["messages"]) == ({"question": "?"}, traj.messages)
    assert (line["reward"], line["metrics"], line["seconds"]) == (0.5, {"correct": 1.0}, {"sampling": 2.0})
    assert (line["turns"], line["generated_tokens"], line["context_tokens"]) == (2, 3, 5)
    assert (line["best"], line["worst"], line["error"], line["truncated"]) == (True, True, None, None)
    assert line["tokens"] == [1, 2, 7, 8, 9]
    assert line["logprobs"][:2] == [None, None]
    assert np.array(line["logprobs"][2:], dtype=np.float32).tolist() == logprobs.tolist()


def test_ids_are_written_only_on_request_and_ages_only_of_what_is_trained() -> None:
    """An evaluation measures one version, and nothing in it has an age."""
    traj = _traj()
    traj.append(Span(kind=SpanKind.GENERATED, tokens=np.ones(2, np.int32), logprobs=np.zeros(2, np.float32), version=5))
    [line] = _lines(_batch([traj], version=5, evaluation="heldout"))
    assert line["segments"] == [{"version": 5, "age": None, "tokens": 2}]
    assert line["evaluation"] == "heldout"
    assert not {"tokens", "logprobs"} & line.keys()


def test_a_member_that_failed_is_kept_with_its_error_and_its_place() -> None:
    """It is the worst of its group."""

    def reward() -> float:
        raise LookupError("no such file")

    failed = _traj(0, 1, reward=None)
    try:
        reward()
    except LookupError as error:
        failed.error = error
    lines = _lines(_batch([_traj(0, 0), failed, _traj(0, 2, reward=-9.0)]), KeptRollouts())
    assert [line["member"] for line in lines] == [0, 1]
    assert lines[1]["worst"]
    assert lines[1]["error"] == "LookupError: no such file"
    assert __file__ in lines[1]["where"]


@pytest.mark.slow
@given(row=VALUES, extra=VALUES, content=VALUES, metrics=st.dictionaries(TEXTS, VALUES, max_size=3))
def test_whatever_users_write_is_one_line_of_json(row: Any, extra: Any, content: Any, metrics: Any) -> None:
    """Also objects that raise when they are looked at, lists that contain themselves, and half a character."""
    messages = [{"role": "user", "content": content}, {"role": "tool", "content": "", "extra": extra}]
    traj = _traj(row=row, messages=messages, metrics=metrics)
    [line] = _lines(_batch([traj]), KeptRollouts(rollout_bytes=2**26))
    assert [message["role"] for message in line["messages"]] == ["user", "tool"]


UNICODE = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | UNICODE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(UNICODE, inner),
    max_leaves=8,
)


@pytest.mark.slow
@given(row=JSON, content=UNICODE, calls=st.lists(JSON, max_size=2), reward=st.floats(-9, 9))
def test_what_json_has_comes_back_as_it_was(row: Any, content: str, calls: list[Any], reward: float) -> None:
    """Rows, messages with their calls, rewards and metrics."""
    messages = [{"role": "assistant", "content": content, "tool_calls": calls}]
    traj = _traj(row=row, messages=messages, reward=reward, metrics={content: reward})
    [line] = _lines(_batch([traj]))
    assert (line["row"], line["messages"]) == (row, messages)
    assert (line["reward"], line["metrics"]) == (reward, {content: reward})
    [with_tokens] = _lines(_batch([traj]), KeptRollouts(rollout_tokens=True))
    assert with_tokens == line | {"tokens": [], "logprobs": []}


def test_messages_that_an_environment_has_spoilt_are_still_messages() -> None:
    """A reader gets dicts whatever the list holds by now."""
    spoilt: list[Any] = ["not a message", None, {1: 2}]
    [line] = _lines(_batch([_traj(messages=spoilt)]))
    assert all(isinstance(message, dict) for message in line["messages"])
    traj = _traj()
    traj.messages = None  # type: ignore[assignment]
    [line] = _lines(_batch([traj]))
    assert all(isinstance(message, dict) for message in line["messages"])


@pytest.mark.slow
@given(
    contents=st.lists(
        st.lists(st.builds(lambda text, times: text * times, TEXTS, st.integers(0, 20_000)), max_size=4),
        min_size=1,
        max_size=6,
    ),
    row=ODDITIES,
    many=st.integers(0, 2000),
)
def test_a_file_keeps_its_bound(contents: list[list[str]], row: Any, many: int) -> None:
    """Whatever is in it; each line stays JSON, and what is missing is counted."""
    messages = [[{"role": "user", "content": text} for text in texts] for texts in contents]
    messages[0] += [{"role": "tool", "content": f"result {index}"} for index in range(many)]
    batch = _batch(*[[_traj(group, messages=said, row=row)] for group, said in enumerate(messages)])
    encoded = encode_rollouts(batch, KeptRollouts(rollout_bytes=65_536))
    assert sum(map(len, encoded)) <= 65_536
    lines = [json.loads(line) for line in encoded]
    full = sum(map(len, encode_rollouts(batch, KeptRollouts(rollout_bytes=2**30))))
    if full <= 65_536:
        assert len(lines) == len(contents)
    else:
        *lines, last = lines
        assert last["left_out"] == 0  # of a handful, everything has room when it is shortened
        assert last["shortened"] == sum("shortened" in line for line in lines) > 0
        assert last["bytes"] == full - sum(map(len, encoded[:-1]))


def test_a_long_message_is_shortened_before_anything_is_left_out() -> None:
    """In its middle, with a mark; the others, and the other trajectories, stay as they are."""
    long = "a" * 100_000 + "z" * 100_000
    said = [{"role": "user", "content": "short"}, {"role": "tool", "content": long, "name": "search"}]
    *lines, last = _lines(
        _batch([_traj(0, 0, messages=said), _traj(0, 1)]), KeptRollouts(rollout_bytes=65_536, rollouts="all")
    )
    assert [line.get("shortened", False) for line in lines] == [True, False]
    first, second = lines[0]["messages"]
    assert first == said[0]
    assert (second["role"], second["name"]) == ("tool", "search")
    assert second["content"].startswith("aaa")
    assert second["content"].endswith("zzz")
    assert "characters left out]" in second["content"]
    assert last["left_out"] == 0


def test_calls_with_long_arguments_are_shortened_too() -> None:
    """A file that the model writes is a long argument."""
    calls = [{"type": "function", "function": {"name": "write", "arguments": {"text": "x" * 200_000}}}]
    said = [{"role": "assistant", "content": "I write.", "tool_calls": calls}]
    line, _ = _lines(_batch([_traj(messages=said)]), KeptRollouts(rollout_bytes=65_536))
    [message] = line["messages"]
    assert message["role"] == "assistant"
    assert "I write." in message["content"]
    assert "characters left out]" in message["content"]


def test_trajectories_are_left_out_only_where_even_short_ones_have_no_room() -> None:
    """A thousand of them in 64 KiB; and tokens go before any text does."""
    groups = [[_traj(group, 0, messages=[{"role": "user", "content": "x" * 5000}])] for group in range(1000)]
    *lines, last = _lines(_batch(*groups), KeptRollouts(rollout_bytes=65_536))
    assert last["left_out"] == 1000 - len(lines) > 900
    assert [line["group"] for line in lines] == list(range(len(lines)))
    traj = _traj()
    traj.append(Span(kind=SpanKind.PROMPT, tokens=np.ones(50_000, np.int32)))
    line, last = _lines(_batch([traj]), KeptRollouts(rollout_bytes=65_536, rollout_tokens=True))
    assert (line["tokens"], line["logprobs"], line["messages"]) == (None, None, traj.messages)


async def test_each_step_and_each_evaluation_has_its_file(tmp_path: Path) -> None:
    """On leaving the block they are on disk; what is done again replaces its file, and nothing else is there."""
    events = Events()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / ".step-000009.jsonl.partial").write_bytes(b'{"half')
    async with write_rollouts(tmp_path, events):
        events.emit(_batch([_traj()], n=0, evaluation="heldout"))
        events.emit(_batch([_traj(reward=1.0)], n=1))
        events.emit(_batch([_traj(reward=2.0)], n=1))
        events.emit(_batch([_traj()], n=2))
        events.emit(_batch([_traj()], n=2, evaluation="of my own/..\0"))
    events.emit(_batch([_traj()], n=3))
    names = ["eval-000000-heldout", "step-000001", "step-000002", "eval-000002-of_my_own____"]
    assert [file.path.stem for file in await _files(tmp_path)] == names
    assert len(list((tmp_path / "rollouts").glob("*"))) == len(names)
    [again] = await _files(tmp_path, step=1)
    assert [traj["reward"] for traj in again.trajectories] == [2.0]
    assert [file.n for file in await _files(tmp_path, evaluation="")] == [1, 2]
    assert [file.n for file in await _files(tmp_path, evaluation="heldout")] == [0]


async def test_without_rollouts_nothing_is_asked_for_or_written(tmp_path: Path) -> None:
    """The trajectories are not even handed over."""
    events = Events()
    async with write_rollouts(tmp_path, events, KeptRollouts(rollouts="none")):
        assert not events.wants(RolloutsFinished)
    assert await _files(tmp_path) == []


async def test_a_cancelled_or_failed_run_still_writes_its_last_trajectories(tmp_path: Path) -> None:
    """They are the ones to look at."""
    events = Events()
    with anyio.CancelScope() as scope:
        async with write_rollouts(tmp_path, events):
            events.emit(_batch([_traj()], n=1))
            scope.cancel()
            await anyio.sleep_forever()
    with pytest.raises(ExceptionGroup) as raised:
        async with write_rollouts(tmp_path, events):
            events.emit(_batch([_traj()], n=2))
            raise ValueError("the run failed")
    assert raised.group_contains(ValueError, match="the run failed")
    assert [file.n for file in await _files(tmp_path)] == [1, 2]


async def test_a_failing_disk_ends_the_block_with_its_error(tmp_path: Path) -> None:
    """And what happens while it ends raises nothing more."""
    events = Events()
    with pytest.raises(ExceptionGroup) as raised:
        async with write_rollouts(tmp_path, events) as writer:
            (tmp_path / "rollouts" / "step-000001.jsonl").mkdir()
            (tmp_path / "rollouts" / "step-000001.jsonl" / "file").touch()
            events.emit(_batch([_traj()], n=1))
            try:
                await anyio.sleep_forever()
            finally:
                events.emit(_batch([_traj()], n=2))
    [error] = raised.value.exceptions
    assert isinstance(error, OSError)
    assert writer.lost == 1


async def test_batches_beyond_the_bound_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot keep up costs files, never memory, and each loss is a notice that says what to do."""
    monkeypatch.setattr(module, "_PENDING", 3)
    events = Events()
    notices: list[Notice] = []
    events.subscribe(lambda event: notices.append(event) if isinstance(event, Notice) else None)
    async with write_rollouts(tmp_path, events) as writer:
        await anyio.lowlevel.checkpoint()  # the writer waits for its first batch
        for n in range(10):
            events.emit(_batch([_traj()], n=n))
        lost = writer.lost
    assert 0 < lost == len(notices)
    assert {notice.name for notice in notices} == {"rollouts_lost"}
    assert "run.rollouts" in str(notices[0].keys)
    assert len(await _files(tmp_path)) == 10 - lost


async def test_encoding_and_writing_happen_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's thread hands trajectories over and does nothing else with them."""
    threads = set()
    write_file = module._write_file

    def watched(*args: Any) -> None:
        threads.add(threading.get_ident())
        write_file(*args)

    monkeypatch.setattr(module, "_write_file", watched)
    events = Events()
    async with write_rollouts(tmp_path, events):
        events.emit(_batch([_traj()]))
    assert threads
    assert threading.get_ident() not in threads


async def test_no_trajectory_is_held_once_it_is_written(tmp_path: Path) -> None:
    """A batch can be gigabytes."""
    events = Events()
    async with write_rollouts(tmp_path, events):
        row = Puzzle("why", {1})
        kept = weakref.ref(row)
        events.emit(_batch([_traj(row=row)]))
        del row
        with anyio.fail_after(10):
            while kept() is not None:
                await anyio.lowlevel.checkpoint()


def test_other_observers_get_no_trajectories() -> None:
    """Neither a file of events nor a test's list keeps them: only who names the kind is told."""
    events, seen, named = Events(), list[Event](), list[Event]()
    events.subscribe(seen.append)
    assert not events.wants(RolloutsFinished)
    events.subscribe(named.append, kinds=(RolloutsFinished,))
    assert events.wants(RolloutsFinished)
    events.emit(_batch([_traj()]))
    assert (len(seen), len(named)) == (0, 1)
    assert "Group" not in repr(named[0])


DAMAGE = [b"", b"{", b'{"group": 1}', b"[1, 2]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"left_out": 3, "bytes": 9}']


@pytest.mark.slow
@given(before=st.lists(st.sampled_from(DAMAGE) | st.binary(max_size=40), max_size=4))
def test_damaged_lines_cost_only_themselves(before: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> None:
    """They are counted, and the others are read; files that are not ours are no files of rollouts."""
    directory = tmp_path_factory.mktemp("run")
    folder = directory / "rollouts"
    folder.mkdir()
    (folder / "step-000001.jsonl~").write_text("an editor's")
    (folder / "step-1.jsonl").write_text("somebody's")
    whole = encode_rollouts(_batch([_traj()]), ALL)
    (folder / "step-000001.jsonl").write_bytes(b"\n".join([*before, *whole]))
    [file] = read_rollouts(directory)
    assert [traj["id"] for traj in file.trajectories] == ["000000-000"]
    assert file.unreadable <= sum(piece.count(b"\n") + piece.count(b"\r") + 1 for piece in before)


class Echo(rl.Env):
    """A row is the length of the answer that it wants."""

    async def reset(self, row: Row) -> list[Message]:
        """The question."""
        return [{"role": "user", "content": f"say {row}"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """Members differ; the last one of each group breaks."""
        if traj.member == 3:
            raise LookupError("no grade")
        return float(traj.member)


async def test_a_run_leaves_what_was_said(tmp_path: Path) -> None:
    """Steps and evaluations, extremes and failures, versions and ages, from the trainer itself."""
    engine = rl.RolloutEngine(scripted_policy(sampler=ScriptedSampler()), env=Echo, renderer=ByteRenderer())
    trainer = AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-3),
        groups_per_step=2,
        group_size=4,
        max_staleness=1,
        evaluator=rl.Evaluator(rows=["held out"], every=2, group_size=2),
    )
    async with write_rollouts(tmp_path, trainer.events):
        async for _ in trainer.run(["a", "b", "c"], steps=3):
            pass
    files = await _files(tmp_path)
    assert [(file.n, file.evaluation) for file in files] == [
        (0, "heldout"),
        (1, ""),
        (2, ""),
        (2, "heldout"),
        (3, ""),
        (3, "heldout"),
    ]
    for file in files:
        assert [traj["member"] for traj in file.trajectories] == ([0, 1] if file.evaluation else [2, 3, 2, 3])
        for traj in file.trajectories:
            assert traj["messages"][0]["content"] == f"say {traj['row']}"
            assert traj["messages"][1] == {"role": "assistant", "content": chr(65 + traj["segments"][0]["version"]) * 3}
            ages = [segment["age"] for segment in traj["segments"]]
            expected = [None if file.evaluation else traj["version"] - traj["segments"][0]["version"]]
            assert ages == expected
        if not file.evaluation:
            assert "LookupError: no grade" in file.trajectories[1]["error"]
            assert __file__ in file.trajectories[1]["where"]
