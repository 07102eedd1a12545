"""Versions that a run has not made: refused in what a sampler answers and in what was saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.state import GroupState, RunState
from asyncrl.errors import CheckpointError, ProtocolError
from asyncrl.rollout.progress import GroupProgress
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import ScriptedSampler
from asyncrl.types import Group, Segment, Span, SpanKind, Trajectory, VersionSpan
from tests.faults.case import Case


class _Foreign(ScriptedSampler):
    """Answers the requests from number ``first`` on with ``offset`` added to the version of their last token."""

    def __init__(self, first: int, offset: int) -> None:
        super().__init__()
        self._first = first
        self._offset = offset

    async def sample(self, request: SegmentRequest) -> Segment:
        segment = await super().sample(request)
        if len(self.requests) <= self._first or not len(segment.tokens):
            return segment
        last = len(segment.tokens) - 1
        spans = [VersionSpan(version=request.version, start=0, end=last)] if last else []
        foreign = VersionSpan(version=request.version + self._offset, start=last, end=last + 1)
        return replace(segment, versions=(*spans, foreign))


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("first", [0, 5, 9])
@pytest.mark.parametrize("offset", [-50, 43, 10**9])
def test_a_version_of_somebody_else_ends_the_run_untrained(max_staleness: int, first: int, offset: int) -> None:
    """With both numbers, instead of training tokens of a negative age."""
    case = Case(sampler=_Foreign(first, offset), max_staleness=max_staleness)
    with pytest.raises(ProtocolError, match=r"has answered with version -?\d+, but the newest of this run is \d+"):
        case.play(steps=9)
    trained = [span.version for step in case.steps for traj in step.trajectories for span in traj.spans]
    assert {version for version in trained if version is not None} <= set(range(len(case.steps)))


def _trajectory(group: int, member: int, versions: list[int], held: int | None) -> Trajectory:
    traj = Trajectory(id=f"{group}-{member}", group=group, member=member, row=0, seed=0)
    traj.append(Span(kind=SpanKind.PROMPT, tokens=np.array([1], dtype=np.int32)))
    for version in versions:
        tokens, logprobs = np.array([2, 3], dtype=np.int32), np.zeros(2, dtype=np.float32)
        traj.append(Span(kind=SpanKind.GENERATED, tokens=tokens, logprobs=logprobs, version=version))
    traj.version = traj.anchor = held
    return traj


VERSIONS = st.integers(-3, 12)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    at=st.integers(0, 8),
    finished=st.lists(st.lists(VERSIONS, max_size=3), max_size=3),
    active=st.lists(st.tuples(st.lists(VERSIONS, max_size=3), st.none() | VERSIONS), max_size=3),
)
def test_a_saved_state_has_no_tokens_of_versions_that_its_run_has_not_made(
    at: int, finished: list[list[int]], active: list[tuple[list[int], int | None]]
) -> None:
    """Wherever they are in it: its files are then of more than one run."""
    done = [_trajectory(0, member, versions, None) for member, versions in enumerate(finished)]
    parts = [Group(index=0, row=0, members_G=done, seconds=0.0, final=False)] if done else []
    going = {member: _trajectory(1, member, *traj) for member, traj in enumerate(active)}
    groups = {
        0: GroupState(index=0, parts=parts),
        1: GroupState(index=1, progress=GroupProgress(active=going)),
    }
    state = RunState(n=at, version=at, admitted=2, groups=groups)
    every = [version for versions in finished for version in versions]
    every += [version for versions, held in active for version in [*versions, held] if version is not None]
    if all(0 <= version <= at for version in every):
        state.require_versions()
    else:
        with pytest.raises(CheckpointError, match=f"but the run is at version {at}: its files are not of one run"):
            state.require_versions()
