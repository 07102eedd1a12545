from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.simulation.parts import Playback, blank, member_of
from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript
from tests.simulation.recording import workload


def _turn(tokens: int) -> TurnScript:
    return TurnScript(new_tokens=3, uncached_tokens=2, tokens=tokens, reply_s=0.0)


def _playback(*turns: int, truncated: bool = False) -> tuple[Playback, tuple[TurnScript, ...]]:
    script = MemberScript(turns=tuple(map(_turn, turns)), reward=1.0, truncated=truncated)
    return Playback([GroupScript(members=(script,))]), script.turns


def test_a_turn_is_divided_as_the_budget_says() -> None:
    """25 tokens in requests of at most 10; only the first begins the turn, only the last completes it."""
    playback, turns = _playback(25)
    assert playback.sample("000000-000", 10) == (turns[0], 10, False)
    assert playback.sample("000000-000", 10) == (None, 10, False)
    assert playback.sample("000000-000", 10) == (None, 5, True)


def test_trajectories_have_places_of_their_own() -> None:
    """What one has sampled is not missing in another; groups and members repeat if there are more than scripts."""
    playback, turns = _playback(10)
    playback.sample("000000-000", 4)
    assert playback.sample("000007-003", 10) == (turns[0], 10, True)
    assert playback.sample("000000-000", 10) == (None, 6, True)


def test_the_next_turn_begins_even_if_the_last_was_cut() -> None:
    """A simulated budget may be smaller than that of the run."""
    playback, turns = _playback(10, 7)
    playback.sample("000000-000", 4)
    playback.next_turn("000000-000", 1)
    assert playback.sample("000000-000", 10) == (turns[1], 7, True)


def test_a_truncated_trajectory_never_ends_by_itself() -> None:
    """Its last turn is not complete; a larger budget finds no more tokens, which ends it as an empty sample."""
    playback, turns = _playback(10, truncated=True)
    assert playback.sample("000000-000", 10) == (turns[0], 10, False)
    assert playback.sample("000000-000", 10) == (None, 0, True)
    playback.next_turn("000000-000", 1)
    assert playback.sample("000000-000", 10) == (None, 0, True)


def test_a_larger_group_repeats_its_members() -> None:
    """A group of 2 simulated as one of 5."""
    group = GroupScript(members=tuple(MemberScript(turns=(_turn(1),), reward=reward) for reward in (0.0, 1.0)))
    assert [member_of(group, member).reward for member in range(5)] == [0.0, 1.0, 0.0, 1.0, 0.0]


def _rows(groups: int, margins: tuple[int, int], *, before: int, counted: int, after: int) -> list[float]:
    """Which groups are simulated, by their place in the run."""
    scripts = [GroupScript(members=(MemberScript(turns=(), reward=place),)) for place in range(groups)]
    chosen = replace(workload(), groups=scripts, margins=margins).rows(before=before, counted=counted, after=after)
    return [group.members[0].reward for group in chosen]


def test_the_groups_that_count_are_spread_over_the_steady_state() -> None:
    """In order and evenly, whatever is simulated before and after them from the run's beginning and end."""
    assert _rows(10, (2, 2), before=2, counted=3, after=1) == [0, 1, 2, 4, 6, 8]
    assert _rows(10, (2, 2), before=4, counted=3, after=2) == [0, 0, 1, 1, 2, 4, 6, 8, 9]


def test_too_few_groups_are_used_equally_often() -> None:
    """A short run can stand for a longer one, and one without a steady state for itself."""
    assert _rows(2, (0, 0), before=1, counted=4, after=0) == [0, 0, 0, 1, 1]
    assert _rows(2, (2, 2), before=2, counted=4, after=2) == [0, 1, 0, 0, 1, 1, 0, 1]


def test_long_contexts_have_the_right_length_too() -> None:
    """Beyond the buffer that shorter ones share."""
    assert len(blank(100_000)) == 100_000
    assert np.shares_memory(blank(7), blank(9))
