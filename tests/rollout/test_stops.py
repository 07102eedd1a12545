"""A turn is the same however many requests it takes: stop strings, aborts, and what a budget cuts off."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.events import SegmentSampled
from asyncrl.rollout.budget import cut_at_stop
from asyncrl.rollout.renderer import TextRenderer
from asyncrl.rollout.toolcalls import ParsedTurn, parse_hermes
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedSampler
from asyncrl.types import (
    IntArray,
    Message,
    Row,
    Segment,
    Span,
    SpanKind,
    StopReason,
    Trajectory,
    TruncationCause,
    VersionSpan,
)
from tests.faults.case import UNTRAINED, Case, One

# Ids 10.. are these: characters, several of them, and parts of one.
PIECES = [b"a", b"b", b"ab", b"ba", b"aab", b"\n", b"b\n", b"\xe2", b"\x82", b"\xac", b"\xe2\x82\xac", b"\xac a"]
FIRST = 10
PROMPT = "q"


class Pieces(ByteRenderer):
    """Tokens that are pieces of bytes, as those of a byte-level tokenizer."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)

    def text(self, ids: IntArray) -> str:
        pieces = [PIECES[token - FIRST] for token in ids.tolist() if token >= FIRST]
        return b"".join(pieces).decode("utf-8", "replace")


class Server(ScriptedSampler):
    """Says ``script``, and sees a stop string only in the tokens of one request. Some requests are aborted."""

    def __init__(self, renderer: Pieces, script: Sequence[int], aborts: random.Random | None) -> None:
        super().__init__()
        self._renderer = renderer
        self._script = [*script, END]
        self._aborts = aborts

    async def sample(self, request: SegmentRequest) -> Segment:
        said = request.input_ids[len(PROMPT) :].tolist()
        assert said == self._script[: len(said)]
        tokens = np.array(self._script[len(said) :][: request.max_new_tokens], dtype=np.int32)
        stop = StopReason.STOP if tokens[-1] == END else StopReason.LENGTH
        if self._aborts is not None and self._aborts.random() < 0.4:
            tokens, stop = tokens[: self._aborts.randrange(len(tokens) + 1)], StopReason.ABORT
        for count in range(1, len(tokens) + 1):
            # The server is asked to abort in the same moment as often as not.
            if stop is not StopReason.ABORT and _stopped(self._renderer, tokens[:count]):
                tokens, stop = tokens[:count], StopReason.STOP
                break
        middle = len(tokens) // 2
        spans = [(0, middle), (middle, len(tokens))]
        return Segment(
            tokens=tokens,
            logprobs=(-tokens / 100).astype(np.float32),
            versions=tuple(VersionSpan(version=0, start=start, end=end) for start, end in spans if start < end),
            stop=stop,
        )


def _stopped(renderer: Pieces, tokens: IntArray) -> bool:
    text = renderer.text(tokens)
    return any(stop in text for stop in renderer.stop)


def _turn(stop: Sequence[str], script: Sequence[int], *, segment: int, aborts: random.Random | None) -> Case:
    renderer = Pieces(stop)

    class Once(One):
        async def reset(self, row: Row) -> list[Message]:
            return [{"role": "user", "content": PROMPT}]

    budget = rl.Budget(segment_tokens=segment, max_generated_tokens=1000)
    case = Case(
        Once, sampler=Server(renderer, script, aborts), group_size=2, engine={"renderer": renderer, "budget": budget}
    )
    case.play(1, rows=1)
    return case


SCRIPTS = st.lists(st.integers(FIRST, FIRST + len(PIECES) - 1), min_size=1, max_size=24)
STOPS = st.lists(
    st.sampled_from(["ab", "aba", "b\n", "\n", "bb", "\u20ac", "a\u20ac", "aabba", "b\u20ac a"]),
    min_size=1,
    max_size=3,
    unique=True,
)


@pytest.mark.slow
@given(STOPS, SCRIPTS, st.integers(1, 9), st.none() | st.integers(0, 10**6))
@settings(derandomize=True, max_examples=80, deadline=None)
def test_a_turn_is_the_same_however_it_is_cut_into_requests(
    stop: list[str], script: list[int], segment: int, aborts: int | None
) -> None:
    """Its ids, log-probabilities, text and end; nothing beyond the stop string is trained, and it is told."""
    whole = _turn(stop, script, segment=1000, aborts=None).steps[0].trajectories[0]
    case = _turn(stop, script, segment=segment, aborts=None if aborts is None else random.Random(aborts))
    for traj in case.steps[0].trajectories:
        assert traj.tokens().tolist() == whole.tokens().tolist()
        assert (traj.final_text, traj.stop, traj.truncated) == (whole.final_text, StopReason.STOP, None)
        said = [span for span in traj.spans if span.kind is SpanKind.GENERATED]
        assert [float(value) for span in said if span.logprobs is not None for value in span.logprobs] == pytest.approx(
            [-token / 100 for span in said for token in span.tokens]
        )
    served = sum(event.tokens for event in case.of(SegmentSampled))
    cut = sum(event.cut_tokens for event in case.of(SegmentSampled))
    assert served - cut == sum(traj.generated_tokens for traj in case.steps[0].trajectories)
    assert case.steps[0].metrics["sampling/wasted_tokens"] == cut
    trained = sum(int(sequence.mask.sum()) for batch in case.learner.batches for sequence in batch)
    assert trained == served - cut


def _open(tokens: Sequence[int]) -> Trajectory:
    traj = Trajectory(id="0", group=0, member=0, row=0, seed=0)
    traj.append(Span(kind=SpanKind.PROMPT, tokens=np.array([10, 11], dtype=np.int32)))
    for token in tokens:
        ids = np.array([token], dtype=np.int32)
        traj.append(Span(kind=SpanKind.GENERATED, tokens=ids, logprobs=-ids.astype(np.float32), version=1))
    return traj


def _segment(
    tokens: Sequence[int], stop: StopReason, versions: Sequence[tuple[int, int, int]] | None = None
) -> Segment:
    ids = np.array(tokens, dtype=np.int32)
    spans = versions or ([(1, 0, len(ids))] if len(ids) else [])
    return Segment(
        tokens=ids,
        logprobs=-ids.astype(np.float32),
        versions=tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in spans),
        stop=stop,
    )


@pytest.mark.parametrize(
    ("before", "tokens", "stop", "kept", "reason"),
    [
        ([10], [11, 10], StopReason.LENGTH, 1, StopReason.STOP),  # "a" + "b" completes "ab"
        ([11], [12, 10], StopReason.ABORT, 1, StopReason.STOP),  # one token
        ([10], [10, 10], StopReason.LENGTH, 2, StopReason.LENGTH),
        ([10], [15, 11], StopReason.STOP, 2, StopReason.STOP),
        ([], [10, 11], StopReason.ABORT, 2, StopReason.STOP),  # stopped and aborted in one moment
        ([], [10, 11, 10], StopReason.LENGTH, 2, StopReason.STOP),  # a server that looks at too little
        ([10], [13, 15, END], StopReason.STOP, 1, StopReason.STOP),  # ends inside of "ba"
        ([10], [15, END], StopReason.ABORT, 2, StopReason.STOP),  # the stop token, and an abort in one moment
        ([10], [], StopReason.ABORT, 0, StopReason.ABORT),
        ([], [], StopReason.STOP, 0, StopReason.STOP),
    ],
)
def test_a_segment_ends_behind_the_token_that_completes_a_stop_string(
    before: list[int], tokens: list[int], stop: StopReason, kept: int, reason: StopReason
) -> None:
    """Each token keeps its log-probability and its version."""
    half = len(tokens) // 2
    versions = [(version, *place) for version, *place in [(1, 0, half), (2, half, len(tokens))] if place[0] < place[1]]
    found = cut_at_stop(_segment(tokens, stop, versions), _open(before), Pieces(["ab"]))  # type: ignore[arg-type]
    assert found.tokens.tolist() == tokens[:kept]
    assert found.logprobs.tolist() == [-float(token) for token in tokens[:kept]]
    assert found.stop is reason
    assert [span.end for span in found.versions] == [min(end, kept) for _, start, end in versions if start < kept]


def test_earlier_turns_and_the_prompt_do_not_count() -> None:
    """Only what the model says in this turn, as a server would see it."""
    traj = _open([10])
    traj.append(Span(kind=SpanKind.FRAMING, tokens=np.array([10], dtype=np.int32)))
    traj.turn_tokens = 0
    segment = _segment([11, 11], StopReason.LENGTH)
    assert cut_at_stop(segment, traj, Pieces(["ab"])) is segment


def test_without_stop_strings_nothing_is_decoded() -> None:
    """And a renderer of one's own needs no ``text``."""

    class Silent(ByteRenderer):
        def text(self, ids: IntArray) -> str:
            raise AssertionError("it has no stop strings")

    segment = _segment([65] * 9, StopReason.LENGTH)
    assert cut_at_stop(segment, _open([65]), Silent()) is segment


def test_only_the_tail_of_a_long_turn_is_decoded() -> None:
    """What a segment costs does not grow with the turn."""
    asked: list[int] = []

    class Counting(Pieces):
        def text(self, ids: IntArray) -> str:
            asked.append(len(ids))
            return super().text(ids)

    cut_at_stop(_segment([10] * 5, StopReason.LENGTH), _open([10] * 1000), Counting(["ab", "b\n"]))
    assert asked == [5 + 4 * 3]


@pytest.mark.parametrize("stop", ["ab", ["a", ""], [1], [None]])
def test_stop_strings_that_are_none_are_refused(stop: Any) -> None:
    """A text would be taken for its characters; an empty one is everywhere."""
    with pytest.raises(ConfigError, match="stop is "):
        Case(engine={"stop": stop})


@pytest.mark.parametrize("split", range(1, 6))
def test_a_real_tokenizer_finds_a_string_over_two_requests(make_tokenizer: Callable[..., Any], split: int) -> None:
    """Character by character, and at every place of the cut."""
    tokenizer = make_tokenizer(None)
    renderer = TextRenderer(tokenizer, stop=["stop"])
    ids = tokenizer.encode("a stop b", add_special_tokens=False)
    found = cut_at_stop(_segment(ids[split:], StopReason.LENGTH), _open(ids[:split]), renderer)
    whole = tokenizer.decode([*ids[:split], *found.tokens.tolist()])
    assert (whole, found.stop) == ("a stop", StopReason.STOP)


CALL = '<tool_call>{"name": "work", "arguments": {}}</tool_call>'


class _Hermes(ByteRenderer):
    async def parse(self, turn_ids: IntArray, tools: Any = ()) -> ParsedTurn:
        return parse_hermes(self.text(turn_ids))


def _cut(said: Sequence[str], budget: rl.Budget, *, tools: Sequence[Any] = (), **trainer: Any) -> list[Trajectory]:
    """Two members that say ``said``, turn by turn, without an end in the last one, until they are truncated."""
    texts: list[tuple[str, list[str]]] = []

    class Talks(One):
        async def reset(self, row: Row) -> list[Message]:
            return [{"role": "assistant", "content": "an example"}, {"role": "user", "content": "q"}]

        async def on_turn(self, traj: Trajectory) -> list[Message]:
            await super().on_turn(traj)
            return [{"role": "user", "content": "on"}]

        async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
            texts.append((traj.final_text, [message["content"] for message in traj.messages]))
            return float(traj.member)

    def tokens(request: SegmentRequest) -> list[int]:
        turn = request.input_ids.tolist().count(END)
        script = [*said[turn].encode(), *([END] if turn < len(said) - 1 else [])]
        done = (
            len(request.input_ids)
            - 1
            - max((i for i, t in enumerate(request.input_ids.tolist()) if t == END), default=-1)
        )
        opening = len("an exampleq") if turn == 0 else len("on")
        return script[done - opening :]

    Talks.tools = tuple(tools)
    case = Case(
        Talks,
        sampler=ScriptedSampler(tokens=tokens),
        engine={"renderer": _Hermes(), "budget": budget, "failures": UNTRAINED},
        **trainer,
    )
    case.play(1, rows=1)
    seen = list(case.steps[0].trajectories)
    assert [text for text, _ in texts] == [traj.final_text for traj in seen]
    assert [said for _, said in texts] == [[message["content"] for message in traj.messages] for traj in seen]
    return seen


@pytest.mark.parametrize(
    ("budget", "said", "final", "cause"),
    [
        (rl.Budget(max_generated_tokens=3), ["4 because"], "4 b", "generated_tokens"),
        (rl.Budget(max_generated_tokens=3, segment_tokens=1), ["4 because"], "4 b", "generated_tokens"),
        (rl.Budget(max_context_tokens=15), ["4 because"], "4 be", "context"),
        (rl.Budget(max_context_tokens=11), ["4 because"], "", "context"),
        (rl.Budget(max_generated_tokens=8), ["5", "wrong, 4"], "wrong,", "generated_tokens"),
        (rl.Budget(max_generated_tokens=2), ["5", "wrong, 4"], "5", "generated_tokens"),
        (rl.Budget(max_turns=1), ["5", "no"], "5", "turns"),
        (rl.Budget(max_turn_tokens=2, max_turns=1), ["5 no"], "5 ", "turns"),
    ],
)
def test_what_a_budget_cuts_off_can_be_read(budget: rl.Budget, said: list[str], final: str, cause: str) -> None:
    """``on_truncated`` and the messages have the text as far as it came; an example in the prompt is not an answer."""
    for traj in _cut(said, budget):
        assert (traj.final_text, str(traj.truncated)) == (final, cause)
        assert traj.cut is (cause != "turns" and final not in ("", "5"))


def test_calls_of_a_turn_that_was_cut_are_not_run() -> None:
    """Whether they were complete or not."""

    @rl.tool
    async def work() -> str:
        """Work."""
        raise AssertionError("a turn that was cut calls nothing")

    for traj in _cut([f"{CALL} and"], rl.Budget(max_generated_tokens=len(CALL) + 2), tools=[work]):
        assert (traj.cut, traj.turns, traj.tool_calls) == (True, 0, [])
        assert traj.final_text == "a"


def test_a_straggler_that_is_truncated_is_read_where_it_was() -> None:
    """The group's deadline is a budget like the others."""
    seen: list[tuple[str, str]] = []

    class Slow(One):
        async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
            seen.append((str(cause), traj.final_text))
            return -1.0

    def tokens(request: SegmentRequest) -> list[int]:
        long = request.trajectory_id.endswith("2")
        return [66] * request.max_new_tokens if long else [65, END]

    completion = rl.GroupCompletion(mode="deadline", min_members=2, max_straggler_tokens=4, on_stragglers="truncate")
    case = Case(
        Slow,
        sampler=ScriptedSampler(tokens=tokens, seconds=lambda request: 1.0),
        group_size=3,
        completion=completion,
        engine={"budget": rl.Budget(segment_tokens=2)},
        allow_trajectory_loss=True,
    )
    case.play(1, rows=1)
    assert seen
    assert {cause for cause, _ in seen} == {"group_deadline"}
    assert all(len(text) >= 2 and set(text) == {"B"} for _, text in seen)
