"""One trainer step: take a batch, add up its gradient, step the optimizer; and where the time of it went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, TypeAlias, get_args

import anyio
import anyio.lowlevel

from asyncrl.concurrency.endings import noted
from asyncrl.errors import NonFiniteError
from asyncrl.events import (
    BarrierOpened,
    BatchTaken,
    ChunkTrained,
    GroupConsumed,
    LearnerStepped,
    VersionCommitted,
)
from asyncrl.learning.base import OptimizerSettings, TrainingSequence
from asyncrl.observe.metrics import BatchMetrics
from asyncrl.rollout.engine import EngineSession
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.training.assembly import StepAssembly
from asyncrl.training.plan import TrainingPlan
from asyncrl.training.record import RunRecord
from asyncrl.training.saving import Saver
from asyncrl.types import BarrierWait, DropReason, Group

__all__ = ["Phase", "PhaseTimes", "TrainerStep"]

Phase: TypeAlias = Literal["wait_for_samples", "barrier", "forward_backward", "optimizer", "publication"]


class PhaseTimes:
    """Owns the seconds of a step by phase. Every moment belongs to exactly one, so that they sum to its wall time."""

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._since = anyio.current_time()

    def end(self, phase: Phase, *, of_which: Mapping[Phase, float] | None = None) -> None:
        """What passed since the last call was ``phase``, but for what ``of_which`` says of other phases."""
        now = anyio.current_time()
        self.seconds[phase] += now - self._since
        self._since = now
        for other, seconds in (of_which or {}).items():
            self.seconds[phase] -= seconds
            self.seconds[other] += seconds

    def metrics(self) -> Mapping[str, float]:
        """``train/batch_seconds`` is the sum of the phases, ``train/seconds`` of those that are work."""
        waited = self.seconds["wait_for_samples"] + self.seconds["barrier"]
        total = sum(self.seconds.values())
        return {
            **{f"train/{phase}_seconds": seconds for phase, seconds in self.seconds.items()},
            "train/batch_seconds": total,
            "train/seconds": total - waited,
        }


class TrainerStep:
    """The ``n``-th step of a run. ``run`` it once; then its attributes say what it did."""

    def __init__(
        self,
        n: int,
        plan: TrainingPlan,
        session: EngineSession,
        admission: Admission,
        batches: Batches,
        record: RunRecord,
        saver: Saver,
    ) -> None:
        self.n = n
        self.version = session.clock.committed
        self.groups: list[Group] = []
        self.is_committed = False
        """Nothing can undo it any more."""
        self.waits: tuple[BarrierWait, ...] = ()
        self.times = PhaseTimes()
        self.optimized: Mapping[str, float] = {"grad_norm": 0.0, "lr": 0.0}
        self.assembly = StepAssembly(
            advantage=plan.advantage,
            normalize=plan.normalize,
            truncation=plan.truncation,
            min_members=plan.completion.min_members,
            temperature=session.settings.temperature,
            version=self.version,
            max_staleness=None if plan.stale_rule.unbounded else plan.max_staleness,
            mask_stale=plan.stale_rule.masked,
        )
        self.batch = BatchMetrics(
            version=self.version,
            max_staleness=plan.max_staleness,
            masked=plan.stale_rule.masked,
            tools=session.tools,
        )
        self._plan = plan
        self._session = session
        self._learner = session.policy.learner
        self._admission = admission
        self._batches = batches
        self._record = record
        self._saver = saver
        record.begin(self.groups)

    async def run(self, size: int, *, steps: int) -> bool:
        """Train on ``size`` groups, of a run of ``steps``; True if that made a version, which is then staged.

        On fewer, or none, if the rows have come to an end. If it does not come that far, the learner forgets the
        gradient.
        """
        try:
            await self._forward_backward(size)
            if not self.assembly.has_gradient:
                await self._end_without_gradient()
                return False
            await self._update(steps)
        except BaseException as error:
            with noted(error), anyio.CancelScope(shield=True):
                await self._learner.discard_gradients()
            raise
        return True

    def metrics(self) -> Mapping[str, float]:
        """How the batch was assembled and trained, and how long that took; see ``batch`` for what it was."""
        return {
            **self.assembly.metrics(),
            **self.times.metrics(),
            **{f"loss/{key}": 0.0 for key in ("loss", "entropy", *self._plan.loss.diagnostics)},
            **{f"loss/{key}": value for key, value in self.assembly.losses().items()},
            **{f"optimizer/{key}": value for key, value in self.optimized.items()},
        }

    async def _forward_backward(self, remaining: int) -> None:
        """Take the batch, whole or in chunks, and accumulate its gradient."""
        while remaining:
            if self._plan.overlap is None:
                chunk = await self._take(remaining)
                remaining = 0
            else:
                chunk = await self._batches.take_chunk(remaining, self._plan.overlap)
                remaining = self._batches.left(remaining - len(chunk)) if chunk else 0
                self._end_wait()
            self.groups += chunk
            if chunk:
                indices = tuple(group.index for group in chunk)
                self._session.events.emit(
                    BatchTaken(time=anyio.current_time(), n=self.n, version=self.version, groups=indices)
                )
            sequences = await self._assemble(chunk, last=not remaining)
            if sequences:
                self._saver.add_chunk(sequences)
                await self._train(sequences)
            self.times.end("forward_backward")

    async def _take(self, size: int) -> list[Group]:
        batch = await self._batches.take(size)
        self.waits = tuple(self._batches.waits)
        self._batches.waits.clear()
        self._end_wait(barrier=sum(wait.seconds for wait in self.waits))
        for wait in self.waits:
            self._session.events.emit(BarrierOpened(time=anyio.current_time(), wait=wait))
        return batch

    def _end_wait(self, *, barrier: float = 0.0) -> None:
        published = self._admission.slot_wait.take()
        self.times.end("wait_for_samples", of_which={"barrier": barrier, "publication": published})

    async def _assemble(self, groups: Sequence[Group], *, last: bool) -> list[TrainingSequence]:
        """Group by group: a batch of thousands is a second of work, and samples and tools are served in between."""
        sequences: list[TrainingSequence] = []
        for group in groups:
            sequences += self.assembly.add([group])
            self.batch.add(group)
            await anyio.lowlevel.checkpoint()
        if last:
            for waiting in self.assembly.finish():
                sequences += waiting
                await anyio.lowlevel.checkpoint()
        return sequences

    async def _train(self, sequences: Sequence[TrainingSequence]) -> None:
        started = anyio.current_time()
        if self._plan.loss.needs_proximal:
            await self._learner.prepare_step(sequences)
        result = await self._learner.forward_backward(sequences, self._plan.loss)
        if not math.isfinite(result.sums.get("loss", 0.0)):
            async with self._written(None, []):
                raise NonFiniteError(f"the loss of a pass of step {self.n} is {result.sums['loss']}; no step was taken")
        self.assembly.record(result)
        now = anyio.current_time()
        self._session.events.emit(
            ChunkTrained(time=now, n=self.n, sequences=len(sequences), tokens=result.tokens, seconds=now - started)
        )

    async def _update(self, steps: int) -> None:
        """The optimizer step, its version, and that version's snapshot for the publisher."""
        started = anyio.current_time()
        settings = self._plan.optimizer.settings(self.n - 1, steps)
        consumed = self._consumed()
        async with self._written(settings, consumed):
            self.optimized = await self._learner.optimizer_step(settings, divisor=self.assembly.divisor)
        # From here to the end of the commit there is no await.
        version = self._session.clock.commit()
        self._settle(version)
        now = anyio.current_time()
        self._session.events.emit(LearnerStepped(time=now, n=self.n, seconds=now - started))
        self._session.events.emit(VersionCommitted(time=now, version=version))
        self._tell(consumed)
        self.times.end("optimizer")
        await self._session.stage(version)
        self.times.end("publication")

    async def _end_without_gradient(self) -> None:
        """No version is made, but the rows are used up."""
        consumed = self._consumed()
        if self.groups:
            async with self._written(None, consumed):
                pass
        self._settle(None)
        self._tell(consumed)

    def _written(
        self, settings: OptimizerSettings | None, consumed: Sequence[GroupConsumed]
    ) -> AbstractAsyncContextManager[None]:
        """The block makes the step happen; it is on disk when the block is left, if anything is kept."""
        entry = self._record.entry(
            n=self.n,
            version=self.version,
            consumed=consumed,
            loss=self._plan.loss,
            divisor=self.assembly.divisor,
            settings=settings,
        )
        return self._saver.step(entry)

    def _settle(self, version: int | None) -> None:
        """Every owner counts the step as made, before anybody is told: an observer may raise."""
        self._admission.settle(version)
        self.is_committed = bool(self.groups)
        self._record.commit(self.n)

    def _tell(self, consumed: Sequence[GroupConsumed]) -> None:
        """Report what became of the members."""
        for event in consumed:
            self._session.events.emit(event)

    def _consumed(self) -> list[GroupConsumed]:
        """What becomes of the members of the batch."""
        now = anyio.current_time()
        events = []
        discards = self._plan.completion.stragglers == "discard"
        for group in self.groups:
            dropped = Counter(member.dropped.value for member in group.members_G if member.dropped is not None)
            trained = len(group.members_G) - dropped.total()
            if discards:
                dropped[DropReason.STRAGGLER.value] += self._plan.group_size - len(group.members_G)
            events.append(
                GroupConsumed(
                    time=now,
                    n=self.n,
                    group=group.index,
                    trained=trained,
                    dropped={reason: count for reason, count in dropped.items() if count},
                    final=group.final,
                )
            )
        return events
