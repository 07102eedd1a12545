"""What must hold of every run under ``wait``, by what the sampler and the learner saw themselves."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from asyncrl.types import SpanKind
from tests.scheduling.audit import ScheduleAudit
from tests.scheduling.runs import Run
from tests.scheduling.truth import Dispatch, spelled

__all__ = ["assert_ages", "assert_nothing_is_held", "assert_nothing_is_lost", "assert_promises", "assert_versions"]


def assert_promises(run: Run, audit: ScheduleAudit) -> None:
    """The run ended, and kept all of them."""
    assert [step.n for step in run.steps] == list(range(1, run.shape.steps + 1))
    assert_nothing_is_lost(run, audit)
    assert_ages(run)
    assert_versions(run, audit)
    assert_nothing_is_held(run)


def assert_nothing_is_lost(run: Run, audit: ScheduleAudit) -> None:
    """Every group of the run was admitted and consumed, whole and once; no member was dropped."""
    assert [traj.error for step in run.steps for traj in step.trajectories if traj.error is not None] == []
    assert len(audit.consumed) == len(audit.admitted) == run.shape.groups
    assert audit.held == 0
    everyone = range(run.shape.group_size)
    for step in run.steps:
        assert all(traj.dropped is None for traj in step.trajectories)
        members = sorted((traj.group, traj.member) for traj in step.trajectories)
        groups = [[member for _, member in group] for _, group in groupby(members, lambda pair: pair[0])]
        assert groups == [list(everyone)] * run.shape.groups_per_step
    signal = [group for group in audit.consumed if group % 5 not in run.shape.flat_rows]
    trained = Counter((trained.group, trained.member) for trained in run.learner.trained)
    assert trained == Counter([(group, member) for group in signal for member in everyone] * run.shape.epochs)


def assert_ages(run: Run) -> None:
    """Within the bound, by the learner's count of versions and by what the tokens say."""
    ages = [age for trained in run.learner.trained for age in trained.ages]
    assert all(0 <= age <= run.shape.max_staleness for age in ages)


def assert_versions(run: Run, audit: ScheduleAudit) -> None:
    """Requests, spans and births have the version that was live at their dispatch."""
    first: dict[int, Dispatch] = {}
    for dispatch in run.sampler.dispatches:
        first.setdefault(dispatch.group, dispatch)
        assert dispatch.request.version == dispatch.version
        assert dispatch.request.adapter == f"scripted-v{dispatch.version}"
    for group, born in audit.born.items():
        assert (born.time, born.version) == (first[group].time, first[group].version)
        assert born.due == born.version + run.shape.max_staleness - (run.shape.updates - 1)
    births = [audit.born[group].time for group in sorted(audit.born)]
    assert births == sorted(births), "slots and requests go to the oldest group first"
    for step in run.steps:
        for traj in step.trajectories:
            versions = [span.version for span in traj.spans if span.version is not None]
            assert versions == sorted(versions)
            assert run.shape.kv_cache is not None or len(set(versions)) == 1
            for span in traj.spans:
                if span.kind is SpanKind.GENERATED:
                    assert spelled(span.tokens) == ({span.version}, {(traj.group, traj.member)})


def assert_nothing_is_held(run: Run) -> None:
    """No version, no request and no environment is left, and there were never more requests than allowed."""
    assert not +run.publisher.holders
    assert run.sampler.in_flight == 0
    assert run.sampler.peak_in_flight <= (run.shape.requests or run.shape.concurrency)
    assert all(env.closed == 1 for env in run.envs)
