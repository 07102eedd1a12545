"""An engine that is up: what ``publish`` does, and what it needs before it samples."""

from __future__ import annotations

from functools import partial

import pytest

import asyncrl as rl
from asyncrl.errors import StalenessError
from asyncrl.events import Events, VersionPublished
from asyncrl.rollout.engine import EngineSession
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.testing import ByteRenderer, ScriptedPublisher, run_virtual, scripted_policy
from asyncrl.types import Group, Message, Row, Trajectory


class _Talk(rl.Env):
    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "go"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return 1.0


class _Publisher(ScriptedPublisher):
    """Says too when versions are being published."""

    def __init__(self, *, pins_versions: bool) -> None:
        super().__init__(seconds=lambda: 2.0, pins_versions=pins_versions)
        self.clock: PolicyClock | None = None
        self.seen: list[tuple[int, int, int]] = []

    async def publish(self, version: int) -> float:
        assert self.clock is not None
        self.seen.append((version, self.clock.published, self.clock.arriving))
        return await super().publish(version)


def _engine(publisher: ScriptedPublisher) -> rl.RolloutEngine:
    return rl.RolloutEngine(scripted_policy(publisher=publisher), env=_Talk, renderer=ByteRenderer())


def test_nothing_is_sampled_before_a_version_is_published() -> None:
    """An engine that was just opened has none; with the first it samples."""

    async def work() -> None:
        async with _engine(ScriptedPublisher()).opened() as session:
            with pytest.raises(StalenessError, match="no version is published yet"):
                await session.group(0, None, 1)
            await session.publish(0)
            assert isinstance(await session.group(0, None, 1), Group)

    run_virtual(work)


@pytest.mark.parametrize("first", [0, 7])
def test_one_method_publishes_the_first_version_and_each_later_one(first: int) -> None:
    """The first one, of a new run or of a resumed one, is staged by it; a version that was staged is not again."""
    publisher, events = ScriptedPublisher(), Events()
    reported: list[VersionPublished] = []
    events.subscribe(reported.append, kinds=(VersionPublished,))  # type: ignore[arg-type]

    async def work() -> None:
        async with _engine(publisher).opened(events) as session:
            await session.publish(first)
            assert (session.clock.committed, session.clock.published) == (first, first)
            await session.stage(session.clock.commit())
            assert session.clock.published == first
            await session.publish(first + 1)
            assert session.clock.published == first + 1

    run_virtual(work)
    assert publisher.staged == publisher.published == [first, first + 1]
    assert [event.version for event in reported] == [first, first + 1]


@pytest.mark.parametrize("pins_versions", [True, False])
def test_the_clock_moves_when_a_version_is_live_and_before_that_is_reported(pins_versions: bool) -> None:
    """Only where servers change their weights under requests may the new version sample before it is live."""
    publisher, events = _Publisher(pins_versions=pins_versions), Events()
    told: list[str] = []

    def hear(session: EngineSession, event: object) -> None:
        told.append(f"reported at {session.clock.published}")

    async def work() -> None:
        async with _engine(publisher).opened(events) as opened:
            publisher.clock = opened.clock
            session = opened.for_training(
                lambda group, version: None, lambda version: told.append(f"live {version}"), resumable=False
            )
            events.subscribe(partial(hear, session), kinds=(VersionPublished,))
            await session.publish(0)
            await session.stage(session.clock.commit())
            await session.publish(1)

    run_virtual(work)
    assert publisher.seen == ([(0, -1, -1), (1, 0, 0)] if pins_versions else [(0, -1, 0), (1, 0, 1)])
    assert told == ["live 0", "reported at 0", "live 1", "reported at 1"]


@pytest.mark.parametrize("version", [0, 2])
def test_a_version_that_the_learner_did_not_commit_is_not_published(version: int) -> None:
    """Neither one that is published already, nor one that is still to be made."""
    publisher = ScriptedPublisher()

    async def work() -> None:
        async with _engine(publisher).opened() as session:
            await session.publish(0)
            with pytest.raises(StalenessError, match=f"version {version} after 0, with 0 committed"):
                await session.publish(version)
            assert session.clock.published == 0

    run_virtual(work)
