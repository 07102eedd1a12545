from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rollout.budget import Budget
from asyncrl.types import Segment, Span, SpanKind, StopReason, Trajectory, TruncationCause, VersionSpan


def segment(tokens: int, stop: StopReason) -> Segment:
    """An answer of that many tokens."""
    versions = (VersionSpan(version=0, start=0, end=tokens),) if tokens else ()
    return Segment(
        tokens=np.zeros(tokens, np.int32), logprobs=np.zeros(tokens, np.float32), versions=versions, stop=stop
    )


def start(prompt: int) -> Trajectory:
    """A trajectory with a prompt of that many tokens."""
    traj = Trajectory(id="0", group=0, member=0, row=None, seed=0)
    traj.append(Span(kind=SpanKind.PROMPT, tokens=np.zeros(prompt, np.int32)))
    return traj


def test_an_aborted_turn_asks_for_exactly_what_is_left() -> None:
    """After 7 of 10 tokens the next request asks for 3, whichever bound the 10 came from."""
    for budget in (
        Budget(max_turn_tokens=10),
        Budget(max_generated_tokens=10),
        Budget(max_context_tokens=15),
    ):
        traj = start(5)
        assert budget.next_segment(traj) == 10
        traj.append_segment(segment(7, StopReason.ABORT))
        assert budget.next_segment(traj) == 3
        assert not budget.turn_complete(traj)


def test_an_exhausted_budget_ends_without_a_request() -> None:
    """No tokens left is a cause of truncation, and which bound it was is said."""
    assert Budget(max_context_tokens=5).next_segment(start(5)) is TruncationCause.CONTEXT
    assert Budget(max_context_tokens=5).next_segment(start(6)) is TruncationCause.CONTEXT
    traj = start(5)
    traj.append_segment(segment(4, StopReason.LENGTH))
    assert Budget(max_generated_tokens=4).next_segment(traj) is TruncationCause.GENERATED_TOKENS


def test_a_budget_stays_within_the_servers_context() -> None:
    """The smaller of both counts, and the rest of the budget is as it was."""
    budget = Budget(max_turns=3, max_context_tokens=100)
    assert budget.within(None) is budget
    assert budget.within(100) is budget
    assert budget.within(40) == Budget(max_turns=3, max_context_tokens=40)
    assert budget.within(40).next_segment(start(40)) is TruncationCause.CONTEXT


def test_a_segment_bounds_one_request_and_not_the_turn() -> None:
    """A turn that was cut by the segment's length goes on with another segment."""
    budget = Budget(segment_tokens=4)
    traj = start(1)
    assert budget.next_segment(traj) == 4
    traj.append_segment(segment(4, StopReason.LENGTH))
    assert not budget.turn_complete(traj)
    assert budget.next_segment(traj) == 4


def test_the_turn_is_complete_at_a_stop_or_at_its_cap() -> None:
    """A stop token ends the turn; so does the cap, of which the environment's own takes precedence."""
    budget = Budget(max_turn_tokens=10)
    traj = start(1)
    traj.append_segment(segment(6, StopReason.LENGTH))
    assert not budget.turn_complete(traj)
    traj.turn_cap = 6
    assert budget.turn_complete(traj)
    traj.turn_cap = 8
    assert budget.next_segment(traj) == 2
    traj.append_segment(segment(1, StopReason.STOP))
    assert budget.turn_complete(traj)


def test_turns_run_out_after_the_last_answer() -> None:
    """The bound on turns is looked at after the environment answered, so a tool call in the last turn still runs."""
    budget = Budget(max_turns=2)
    traj = start(1)
    traj.turns = 1
    assert budget.after_turn(traj) is None
    traj.turns = 2
    assert budget.after_turn(traj) is TruncationCause.TURNS
    assert budget.next_segment(traj) == 4096


@pytest.mark.parametrize("value", [0, -1, True, 2.0, None])
def test_a_bound_must_be_a_positive_integer(value: object) -> None:
    """What is refused is named with its key."""
    with pytest.raises(ConfigError, match=r"budget\.max_turns is .*integer of at least 1"):
        Budget(max_turns=value)  # type: ignore[arg-type]


def test_only_the_turn_cap_may_be_absent() -> None:
    """None means no bound of its own, and 0 is refused there too."""
    assert Budget(max_turn_tokens=None).max_turn_tokens is None
    with pytest.raises(ConfigError, match=r"budget\.max_turn_tokens is 0"):
        Budget(max_turn_tokens=0)


@given(
    generated=st.integers(1, 40),
    context=st.integers(1, 60),
    per_segment=st.integers(1, 12),
    per_turn=st.none() | st.integers(1, 20),
    turn_cap=st.none() | st.integers(1, 20),
    prompt=st.integers(0, 20),
    answers=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(StopReason)), max_size=40),
)
def test_no_bound_is_ever_exceeded(
    generated: int,
    context: int,
    per_segment: int,
    per_turn: int | None,
    turn_cap: int | None,
    prompt: int,
    answers: list[tuple[int, StopReason]],
) -> None:
    """Whatever servers answer within what was asked, no bound is passed, and it always asks for something."""
    budget = Budget(
        max_generated_tokens=generated,
        max_context_tokens=context,
        segment_tokens=per_segment,
        max_turn_tokens=per_turn,
    )
    cap = per_turn if turn_cap is None else turn_cap
    traj = start(prompt)
    traj.turn_cap = turn_cap
    for tokens, stop in answers:
        wanted = budget.next_segment(traj)
        if isinstance(wanted, TruncationCause):
            assert traj.generated_tokens == generated or traj.context_tokens >= context
            return
        assert 1 <= wanted <= per_segment
        traj.append_segment(segment(min(tokens, wanted), stop))
        assert traj.generated_tokens <= generated
        assert traj.context_tokens <= context
        assert cap is None or traj.turn_tokens <= cap
        if budget.turn_complete(traj):
            assert stop is StopReason.STOP or traj.turn_tokens == cap
            traj.turn_tokens = 0
