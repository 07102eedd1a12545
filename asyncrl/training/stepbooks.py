"""A trainer step on its way into the journal: what its entry says, and when it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from asyncrl.checkpoint.journal import Consumed, JournalEntry
from asyncrl.events import GroupConsumed
from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import Loss
from asyncrl.training.capture import Capture
from asyncrl.training.keeper import Checkpoints
from asyncrl.types import Group

__all__ = ["StepBooks"]


class StepBooks:
    """Made once for each run; its methods are called in the order ``begin``, ``written``, ``commit`` for each step."""

    def __init__(self, capture: Capture, checkpoints: Checkpoints, loss: Loss) -> None:
        self._capture = capture
        self._checkpoints = checkpoints
        self._loss = loss
        self._dropped = 0
        # Given-up groups that the entry of the step under way names.

    def begin(self, groups: Sequence[Group]) -> None:
        """A step begins, whose groups will be in this list."""
        self._capture.begun = groups

    @asynccontextmanager
    async def written(
        self,
        *,
        n: int,
        version: int,
        consumed: Sequence[GroupConsumed],
        chunks: Sequence[Sequence[TrainingSequence]],
        divisor: float,
        settings: OptimizerSettings | None,
    ) -> AsyncGenerator[None, None]:
        """The block takes step ``n`` of the optimizer, or none without ``settings``; see ``Checkpoints.step``."""
        self._dropped = len(self._capture.dropped)
        entry = JournalEntry(
            n=n,
            version=version,
            admitted=self._capture.admission.admitted,
            consumed=tuple(
                Consumed(group=group.index, members=tuple(traj.member for traj in group.members_G), final=group.final)
                for group in self._capture.begun
            ),
            dropped=tuple(self._capture.dropped),
            renewed=tuple(self._capture.renewed.values()),
            trained_members=sum(event.trained for event in consumed),
            dropped_members=sum((Counter(event.dropped) for event in consumed), Counter()),
            failed_attempts=self._capture.ledger.totals.failed_attempts,
            rerolled=self._capture.ledger.totals.rerolled,
            loss=repr(self._loss),
            divisor=divisor if settings is not None else 1.0,
            settings=settings,
            chunks=chunks,
        )
        async with self._checkpoints.step(entry):
            yield

    def commit(self, n: int, groups: Sequence[Group]) -> None:
        """The entry counts. Called before anything else can happen."""
        self._capture.commit(n, groups, self._dropped)
