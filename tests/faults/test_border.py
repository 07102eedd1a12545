"""Whole runs of environments that give odd values: each is made plain or refused where it comes in, by name."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError, InvalidValue
from asyncrl.events import MemberFailed
from asyncrl.testing import run_virtual
from asyncrl.types import Message, Row, Trajectory, TruncationCause
from tests.faults.case import Case, HermesRenderer, One, with_tool

pytestmark = pytest.mark.usefixtures("threads_in_place")

USER: Message = {"role": "user", "content": "go on"}
STEPS = 2


def _play(env: type[One], folder: Path | None, *, rows: int = 4, **trainer: Any) -> Case:
    """Two steps of two groups of four; with ``folder`` in two processes, of one step each."""
    options = {"group_size": 4, "engine": {"failures": rl.Failures(consecutive=100, retry_delay=0.0)}, **trainer}
    if folder is None:
        case = Case(env, **options)
        case.play(STEPS, rows=rows)
        return case
    first = Case(env, checkpointing=rl.Checkpointing(folder, rollout_every=0.001), **options)
    first.play(1, rows=rows)
    case = Case(env, checkpointing=rl.Checkpointing(folder, rollout_every=0.001), **options)
    run_virtual(case._run, STEPS, rows)  # its events begin in the middle, so they are not audited
    case.steps[:0] = first.steps
    case.events[:0] = first.events
    return case


def _check_metrics(case: Case) -> None:
    """Plain floats, which are finite or NaN."""
    assert [step.n for step in case.steps] == list(range(1, STEPS + 1))
    for step in case.steps:
        json.dumps(dict(step.metrics))
        assert {type(value) for value in step.metrics.values()} == {float}
        assert not any(map(math.isinf, step.metrics.values()))


class _Odd(One):
    """The last member of each group gives ``value`` as ``what``; the others do as they should."""

    what = ""
    value: Any = None

    def _is_odd(self, traj: Trajectory, what: str) -> bool:
        return traj.member == 3 and self.what == what

    async def reset(self, row: Row) -> Any:
        return self.value if self.what == "reset" else [USER]

    async def on_turn(self, traj: Trajectory) -> Any:
        return self.value if self._is_odd(traj, "on_turn") else None

    async def reward(self, traj: Trajectory, row: Row) -> Any:
        if self._is_odd(traj, "metric"):
            traj.metrics["x"] = self.value
        if self._is_odd(traj, "add_metric"):
            traj.add_metric("x", self.value)
        if self._is_odd(traj, "metrics"):
            traj.metrics = self.value
        return self.value if self._is_odd(traj, "reward") else float(traj.member)

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> Any:
        return self.value if self._is_odd(traj, "on_truncated") else float(traj.member)

    async def snapshot(self, traj: Trajectory) -> Any:
        return self.value if self._is_odd(traj, "snapshot") else {}

    async def restore(self, traj: Trajectory, state: Any) -> None: ...


def _alternating(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*case, index % 2 == 1) for index, case in enumerate(cases)]


def _odd(what: str, value: Any, **extra: Any) -> type[_Odd]:
    return type("Odd", (_Odd,), {"what": what, "value": value, "open": 0, **extra})


NO_NUMBERS: Sequence[Any] = (
    None,
    "1",
    b"1",
    [1.0],
    {"a": 1},
    (1.0, {}),
    1j,
    np.array([1.0, 2.0]),
    torch.zeros(3),
    10**400,
)
REFUSED: Sequence[tuple[str, Any, str]] = (
    *[("metric", value, "metric 'x' is ") for value in NO_NUMBERS],
    *[("add_metric", value, "metric 'x' must be a number, but ") for value in NO_NUMBERS],
    *[
        ("reward", value, "the reward is ")
        for value in (*NO_NUMBERS, math.nan, math.inf, 1e200, -1e13, Decimal("1e500"))
    ],
    ("metrics", None, "traj.metrics is None, but must be a dict"),
    ("metrics", {3: 1.0}, "the name of a metric is 3, but must be text"),
    *[("on_turn", value, "the answer is ") for value in ("text", USER, 3, {1})],
    ("on_turn", [USER, "text"], "message 1 is 'text'"),
    ("on_turn", [{"role": "user"}], "message 0 is {'role': 'user'}, but must be a dict with role and content"),
    ("on_turn", [{"role": "usr", "content": "a"}], "the role of message 0 is 'usr'"),
    ("on_turn", [{"content": "a"}], "the role of message 0 is None"),
    ("on_turn", [{"role": [], "content": "a"}], "the role of message 0 is []"),
    ("on_turn", [{"role": "user", "content": b"a"}], "message 0['content'] is b'a'"),
    ("on_turn", [{"role": "user", "content": 3}], "the content of message 0 is 3"),
    ("on_turn", [{"role": "user", "content": None}], "the content of message 0 is None"),
    ("on_turn", [{"role": "user", "content": ["a"]}], "the content of message 0 is ['a']"),
    ("on_turn", [{**USER, "more": {"a": [object]}}], "message 0['more']['a'][0] is <class 'object'>"),
    ("on_turn", [{**USER, 3: 4}], "a key of message 0 is 3"),
    ("on_turn", rl.TurnResult("text"), "the answer is 'text'"),  # type: ignore[arg-type]
)


# Every second case is that of a run with checkpoints, which is resumed.
@pytest.mark.parametrize(("what", "value", "message", "checkpointing"), _alternating(REFUSED))
def test_an_odd_value_drops_its_member_by_name_and_not_the_run(
    tmp_path: Path, what: str, value: Any, message: str, checkpointing: bool
) -> None:
    """It is not tried again; its group is trained without it; a later process goes on with the same environment."""
    case = _play(_odd(what, value), tmp_path if checkpointing else None)
    failed = case.of(MemberFailed)
    assert {(event.member, event.attempt) for event in failed} == {(3, 1)}
    assert len(failed) >= 2 * STEPS
    for event in failed:
        assert event.error.startswith("InvalidValue: ")
        assert message in event.error
        assert "test_border.py:" in event.error
        assert len(event.error) < 500
    _check_metrics(case)
    for step in case.steps:
        assert step.metrics["groups/failed_members"] == 2.0
        assert sorted(traj.member for traj in step.trajectories if traj.reward is not None) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("value", [None, "text", USER, ["text"], [], [{"role": "user"}], [[USER]], 3, [None]])
def test_a_conversation_that_cannot_begin_ends_the_run_by_name(value: Any) -> None:
    """All members fail, so the run ends; the first error says which function gave what."""
    case = Case(_odd("reset", value), group_size=4)
    with pytest.raises(InvalidValue, match=r"but must be .*\w+\.reset \(.*test_border\.py:\d+\)"):
        case.play(1)


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {1}}, [lambda: 0], b"state"])
def test_a_snapshot_that_is_not_json_drops_its_member_by_name(tmp_path: Path, value: Any) -> None:
    """Only a run with checkpoints asks for one."""
    case = _play(_odd("snapshot", value, recovery="snapshot"), tmp_path)
    assert {event.member for event in case.of(MemberFailed)} == {3}
    assert all("its state" in event.error and "_Odd.snapshot (" in event.error for event in case.of(MemberFailed))
    _check_metrics(case)


@pytest.mark.parametrize("value", [None, b"abc", 3, {"a": 1}, ["a"], np.float32(1)])
def test_a_tool_that_gives_no_text_drops_its_member_by_name(value: Any) -> None:
    """The model is not told: it did nothing wrong."""

    async def work():  # type: ignore[no-untyped-def]
        return value

    case = Case(with_tool(rl.tool(work)), engine={"failures": rl.Failures(consecutive=4)})
    with pytest.raises(InvalidValue, match=r"what tool 'work' returned is .*, but must be text: .*test_border"):
        case.play(1)


NUMBERS: Sequence[tuple[Any, float]] = (
    (True, 1.0),
    (3, 3.0),
    (np.float32(0.5), 0.5),
    (np.bool_(True), 1.0),
    (np.array([2.0]), 2.0),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([True]), 1.0),
    (Decimal("0.25"), 0.25),
    (math.nan, math.nan),
    (math.inf, math.nan),
)


@pytest.mark.parametrize(
    ("what", "value", "expected", "checkpointing"),
    _alternating(
        (what, value, expected)
        for value, expected in NUMBERS
        for what in ("metric", "add_metric", "reward")
        if what != "reward" or math.isfinite(expected)
    ),
)
def test_numbers_of_every_library_mean_the_same(
    tmp_path: Path, what: str, value: Any, expected: float, checkpointing: bool
) -> None:
    """As a metric and as a reward. A metric that is not finite is NaN, also in the sum over the members."""
    case = _play(_odd(what, value), tmp_path if checkpointing else None)
    assert case.of(MemberFailed) == []
    _check_metrics(case)
    for step in case.steps:
        if what == "reward":
            rewards = [traj.reward for traj in step.trajectories if traj.member == 3]
            assert [(type(reward), reward) for reward in rewards] == [(float, expected)] * 2
        else:
            assert step.metrics["rollout/x"] == pytest.approx(2 * expected, nan_ok=True)


def test_the_largest_rewards_train_without_an_overflow() -> None:
    """Their squares are finite, in the metrics and in the advantages."""
    case = _play(_odd("reward", 1e12), None)
    _check_metrics(case)
    assert all(math.isfinite(sequence.advantage) for batch in case.learner.batches for sequence in batch)


TEXTS = st.text(st.characters() | st.sampled_from("\udce9\ud83d\udc4d\x00"), max_size=12)


@pytest.mark.slow
@given(TEXTS, TEXTS, TEXTS)
@settings(derandomize=True, max_examples=15, deadline=None)
def test_text_that_is_not_unicode_never_drops_a_member(said: str, key: str, error: str) -> None:
    """From a row, a tool's answer, an exception, the name of a metric."""

    class Says(One):
        async def reset(self, row: Row) -> list[Message]:
            return [{"role": "user", "content": "q", key: said, "more": [said]}]

        @rl.tool
        async def work(self) -> str:
            """Work."""
            if len(said) % 2:
                raise ValueError(error)
            return said

        async def reward(self, traj: Trajectory, row: Row) -> float:
            traj.metrics[key] = 1.0
            return float(traj.member)

    if key in ("role", "content"):
        return
    case = Case(Says, engine={"renderer": _Utf8()})
    case.play(1)
    assert case.of(MemberFailed) == []
    for traj in case.steps[0].trajectories:
        json.dumps([traj.messages, traj.metrics], ensure_ascii=False).encode()


class _Utf8(HermesRenderer):
    """Takes any text that is Unicode, as tokenizers do."""

    async def continuation(self, before: Sequence[Message], new: Sequence[Message], turn_ids: Any, tools: Any) -> Any:
        return np.frombuffer("".join(message["content"] for message in new).encode() or b"-", np.uint8).astype(np.int32)


ROWS = st.fixed_dictionaries(
    {"messages": st.lists(st.just(USER), min_size=1, max_size=3)},
    optional={
        "big": st.integers(min_value=2**64),
        "tuple": st.dictionaries(st.tuples(st.integers()), st.integers(), max_size=2),
        "text": TEXTS,
        "array": st.just(np.arange(3)),
        "odd": st.just(object()),
    },
)


@pytest.mark.slow
@given(st.lists(ROWS, min_size=1, max_size=3), st.sampled_from(["insert", "pop", "clear", "replace"]))
@settings(derandomize=True, max_examples=15, deadline=None)
def test_what_an_environment_does_to_its_row_the_others_do_not_see(rows: list[Mapping[str, Any]], change: str) -> None:
    """All members of all groups begin with the same prompt, in every pass over the data; the digest takes any row."""
    before = repr(rows)
    seen: list[tuple[int, list[Message]]] = []

    class Changes(One):
        async def reset(self, row: Any) -> list[Message]:
            found = list(row["messages"])
            match change:
                case "insert":
                    row["messages"].insert(0, {"role": "system", "content": "s"})
                case "pop":
                    row.pop("messages")
                case "clear":
                    row["messages"].clear()
                case "replace":
                    row["messages"][0]["content"] = "other"
                    found = [{**found[0], "content": "go on"}, *found[1:]]
            return found

        async def reward(self, traj: Trajectory, row: Any) -> float:
            seen.append((traj.group, traj.messages[:-1]))
            return float(traj.member)

    with tempfile.TemporaryDirectory() as folder:
        case = Case(Changes, group_size=3, checkpointing=rl.Checkpointing(folder))
        case.play(2, rows)
    assert case.of(MemberFailed) == []
    assert repr(rows) == before
    for group, messages in seen:
        assert messages == rows[group % len(rows)]["messages"]


class _Sized:
    """A dataset with a length and rows by number, and nothing else."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {"i": range(3)[index]}


NO_ROWS: Sequence[tuple[Any, str]] = (
    ({"train": [1], "test": [2]}, "'train', 'test'"),
    ("data.jsonl", "rl.load_rows"),
    (Path("data.jsonl"), "rl.load_rows"),
    (b"rows", "read the file"),
    ((i for i in range(3)), "list(..)"),
    (iter([1]), "list(..)"),
    ({1, 2}, "list(..)"),
    (None, "list(..)"),
    (7, "list(..)"),
    ([], "at least one row"),
    ((), "at least one row"),
)


class _Pandas:
    """A frame: a length, columns by name, and rows by a method of its own."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> Any:
        return {"a": [1, 2]}[name]

    def iterrows(self) -> Any: ...

    def notna(self) -> Any: ...

    def astype(self, kind: type) -> _Pandas:
        return self

    def where(self, there: Any, other: None) -> _Pandas:
        return self

    def to_dict(self, kind: str) -> Any:
        assert kind == "records"
        return [{"a": 1}, {"a": 2}]


class _Polars:
    def __len__(self) -> int:
        return 2

    def iter_rows(self) -> Any: ...

    def to_dicts(self) -> Any:
        return [{"a": 1}, {"a": 2}]

    __getitem__ = _Pandas.__getitem__


class _Arrow:
    def __len__(self) -> int:
        return 2

    def to_pylist(self) -> Any:
        return [{"a": 1}, {"a": 2}]

    __getitem__ = _Pandas.__getitem__


class _Dataset:
    """As the library datasets has it: rows by their number."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return {"a": range(1, 3)[number]}


@pytest.mark.parametrize("rows", [_Pandas(), _Polars(), _Arrow(), _Dataset()], ids=lambda value: type(value).__name__)
def test_tables_and_datasets_of_other_libraries_are_rows(rows: Any) -> None:
    """A frame has a dict for each row, though iterating over it would give its columns."""
    assert rl.Evaluator(rows=rows).rows == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("rows", "message"), NO_ROWS, ids=lambda value: type(value).__name__)
def test_what_is_not_a_sequence_of_rows_is_refused_before_anything_starts(rows: Any, message: str) -> None:
    """For training, for rollouts, and for evaluation, with what to write instead."""
    case = Case()
    for begin in (
        lambda: case.trainer.run(rows, steps=1),
        lambda: case.engine.rollout(rows, group_size=2),
        lambda: rl.Evaluator(rows=rows),
    ):
        with pytest.raises(ConfigError) as refused:
            begin()
        assert message in str(refused.value)
        assert "rows" in str(refused.value)
    assert case.events == []


@pytest.mark.parametrize("rows", [[1, 2, 3], (1, 2), range(4), np.arange(3), ["a", "b"], _Sized()], ids=type)
def test_every_sequence_of_rows_is_taken(rows: Any) -> None:
    """Also one that can be read by number only."""
    case = Case()
    case.play(1, rows)
    assert len(case.steps) == 1


def test_a_row_with_a_part_that_cannot_be_copied_is_told_once() -> None:
    """It is shared by the members; everything beside it is not."""
    case = Case(group_size=3)
    case.play(2, [{"stream": (i for i in "ab"), "q": []}])
    [notice] = case.notices("row_is_shared")
    assert "row['stream'] (generator)" in str(notice["reason"])


POISON: Sequence[Any] = (
    None,
    "text",
    object(),
    [object()],
    torch.zeros(2),
    10**400,
    {1: {2: {3}}},
    math.nan,
    "\udce9",
    b"\xff",
)


@pytest.mark.parametrize("value", POISON, ids=lambda value: type(value).__name__)
def test_a_state_saved_with_odd_values_is_no_reason_not_to_go_on(tmp_path: Path, value: Any) -> None:
    """They were there for a moment only, in the middle of a call; then the process was stopped, and the code mended."""

    mended: list[bool] = []

    class Poisons(One):
        open = 0
        recovery = "stateless"

        async def on_turn(self, traj: Trajectory) -> list[Message] | None:
            if mended:
                return None
            traj.metrics["odd"] = value
            traj.messages[0]["content"] = value
            traj.messages.append({"role": "user", "content": [value], "odd": {"deep": value}})
            traj.seconds["odd"] = value
            await anyio.sleep(100.0)
            return None

    async def stopped(case: Case) -> None:
        with anyio.move_on_after(5.0):
            await case._run(STEPS, 4)

    first = Case(Poisons, checkpointing=rl.Checkpointing(tmp_path, rollout_every=1.0))
    run_virtual(stopped, first)
    assert list((tmp_path / "state").glob("*.jsonl")), "it was saved"
    mended.append(True)
    again = Case(Poisons, checkpointing=rl.Checkpointing(tmp_path))
    run_virtual(again._run, STEPS, 4)
    assert [step.n for step in again.steps] == [1, 2]
    assert again.of(MemberFailed) == []
    for step in again.steps:
        json.dumps(dict(step.metrics))


def _fails() -> None:
    raise KeyError("no such answer")


@pytest.mark.parametrize("how", ["plain", "thread", "library", "infrastructure", "value"])
def test_a_failure_says_where_the_users_code_was(how: str) -> None:
    """File, line and function, also where a library or ours raised it."""

    class Fails(One):
        open = 0

        async def reward(self, traj: Trajectory, row: Row) -> float:
            if traj.member:
                return 1.0
            match how:
                case "plain":
                    _fails()
                case "thread":
                    await anyio.to_thread.run_sync(_fails)
                case "library":
                    json.loads("{")
                case "infrastructure":
                    raise TimeoutError("the sandbox")
                case "value":
                    traj.add_metric("x", [])  # type: ignore[arg-type]
            return 0.0

    case = Case(Fails, engine={"failures": rl.Failures(member_retries=0, group_rerolls=0, consecutive=3)})
    with suppress(Exception):
        case.play(1)
    found = case.of(MemberFailed)
    assert found
    name = "_fails" if how in ("plain", "thread") else r"Fails\.reward"
    for event in found:
        assert re.fullmatch(rf".*test_border\.py:\d+ in {name}", event.where), event
