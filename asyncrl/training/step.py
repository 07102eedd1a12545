"""One trainer step: take a batch, add up its gradient, step the optimizer; and where the time of it went."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Literal, Self, TypeAlias, get_args

import anyio
import anyio.lowlevel
import numpy as np

from asyncrl.concurrency.endings import noting_on
from asyncrl.errors import LearnerError, NonFiniteError
from asyncrl.events import (
    BarrierOpened,
    BatchTaken,
    ChunkTrained,
    GroupConsumed,
    LearnerStepped,
    RolloutsFinished,
    StepFinished,
    VersionCommitted,
)
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence, Update, distinct_sequences
from asyncrl.observe.metrics import BatchMetrics
from asyncrl.plain import numbers
from asyncrl.training.assembly import StepAssembly
from asyncrl.training.minibatches import group_parts
from asyncrl.training.reported import StepReport
from asyncrl.training.rewards import TrainingReward
from asyncrl.training.run import TrainingRun
from asyncrl.types import BarrierWait, DropReason, Group, Step

__all__ = ["Phase", "PhaseTimes", "TrainerStep"]

Phase: TypeAlias = Literal["wait_for_samples", "barrier", "forward_backward", "optimizer", "publication"]


_ALWAYS_LOGGED = ("loss", "entropy", "clipped_frac", "masked_frac")
# Of the loss; zero if it has no such thing.


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
    """The ``n``-th step of a run; while it is entered, ``take`` and ``forward_backward`` in turn, and then ``commit``.

    If the block fails before the commit, the learner forgets the gradient; if it fails after it, the step is reported
    all the same, for it has happened. Left in order, it is reported by ``finish``.
    """

    def __init__(self, run: TrainingRun, n: int) -> None:
        options = run.options
        self.n = n
        self.groups: list[Group] = []
        self.times = PhaseTimes()
        self._run = run
        self._options = options
        self._events = run.events
        self._learner = run.session.policy.learner
        self._version = run.clock.committed
        self._wanted = options.groups_per_step
        # Groups that are still to be taken.
        self._is_committed = False
        # Nothing can undo it any more.
        self._waits: tuple[BarrierWait, ...] = ()
        self._updates: list[Update] = []
        # Of this step, each from before its optimizer step on.
        self._chunks: list[Sequence[TrainingSequence]] = []
        # Passes before the only update.
        self._optimized: list[Mapping[str, float]] = []
        self._report = StepReport()
        self._optimizer_s = 0.0
        self._ratios: Mapping[str, float] = {}
        self._versions: tuple[int, ...] = ()
        self._assembly = StepAssembly(
            advantage=options.advantage,
            normalize=options.normalize,
            reward=TrainingReward(truncation=options.truncation, overlong=options.overlong),
            min_members=options.completion.min_members,
            temperature=options.engine.settings.temperature,
            version=self._version,
            max_staleness=options.max_staleness,
            stale_policy=options.stale_policy,
        )
        self._batch = BatchMetrics(
            version=self._version,
            max_staleness=options.max_staleness,
            masked=options.stale_rule.masked,
            tools=run.session.tools,
        )
        run.record.begin(self.groups)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        with noting_on(error):
            if self._is_committed:
                self.finish(0.0)
            else:
                with anyio.CancelScope(shield=True):
                    await self._learner.discard_gradients()
                    await self._learner.end_step()

    @property
    def wants_groups(self) -> bool:
        """True until the batch is complete, or the rows have come to an end."""
        return self._wanted > 0

    async def take(self) -> list[Group]:
        """Take the batch, or a chunk of it if sampling and training overlap; fewer or no groups if no others are left.

        Waits for finished groups, and for the barrier.
        """
        batches, overlap = self._run.batches, self._options.overlap
        if overlap is None:
            groups, self._wanted = await batches.take(self._wanted), 0
        else:
            groups = await batches.take_chunk(self._wanted, overlap)
            self._wanted = batches.obtainable(self._wanted - len(groups)) if groups else 0
        self._end_wait()
        self.groups += groups
        if groups:
            indices = tuple(group.index for group in groups)
            now = anyio.current_time()
            self._events.emit(BatchTaken(time=now, n=self.n, version=self._version, groups=indices))
        return groups

    async def forward_backward(self, groups: Sequence[Group]) -> None:
        """Add the gradient of ``groups``, which were taken last; all updates of a batch but the last step are made."""
        sequences = await self._assemble(groups, last=not self.wants_groups)
        if self._options.updates > 1:
            await self._update()
        elif sequences:
            self._chunks.append(sequences)
            await self._learner.prepare_step(sequences, self._options.loss_object)
            await self._backward(sequences)
        self.times.end("forward_backward")

    async def commit(self) -> int | None:
        """Take the last step of the optimizer, and commit the versions that the updates make.

        Returns the last of them; None if nothing in the batch has a gradient. The rows are used up either way.
        """
        self._ratios = await self._report.metrics()
        if self._chunks:
            self._updates = [
                Update(chunks=self._chunks, divisor=self._assembly.divisor, settings=self._optimizer_settings())
            ]
        run, consumed, started = self._run, self._consumed(), anyio.current_time() - self._optimizer_s
        async with self._written(self._updates, consumed):
            if self._updates:
                await self._optimize(self._updates[-1])
            await self._learner.end_step()
        # From here to the end of the commit there is no await. Every owner counts the step as made, before anybody is
        # told: an observer may raise.
        version = run.clock.commit(len(self._updates)) if self._updates else None
        self._versions = tuple(range(self._version + 1, run.clock.committed + 1))
        run.between_updates = False
        run.admission.end_batch(version)
        self._is_committed = True
        run.record.commit(self.n)
        now = anyio.current_time()
        if version is not None:
            self._events.emit(LearnerStepped(time=now, n=self.n, seconds=now - started))
        for made in self._versions:
            self._events.emit(VersionCommitted(time=now, version=made))
        for event in consumed:
            self._events.emit(event)
        if self._events.wants(RolloutsFinished):
            groups = tuple(self.groups)
            self._events.emit(RolloutsFinished(time=now, n=self.n, version=self._version, groups=groups))
        if version is not None:
            self.times.end("optimizer")
        run.observers.untrained.add(self.groups, version=self._version, made_version=version is not None)
        return version

    def finish(self, evaluation_s: float) -> Step:
        """Report the step, after which an evaluation took ``evaluation_s`` seconds; what the caller gets of it."""
        # A learner of the user's own reports what it likes; a logger gets floats.
        metrics = numbers(self._metrics() | {"evaluation/seconds": evaluation_s})
        now, model_step = anyio.current_time(), self._run.clock.committed
        self._events.emit(StepFinished(time=now, n=self.n, model_step=model_step, metrics=metrics))
        trajectories = [member for group in self.groups for member in group.members_G]
        return Step(
            n=self.n,
            model_step=model_step,
            metrics=metrics,
            trajectories=trajectories,
            waits=self._waits,
            versions=self._versions,
        )

    def _metrics(self) -> dict[str, float]:
        self._run.observers.recorder.add_wasted(self._assembly.wasted_tokens)
        batch = self._batch.metrics()
        divisors = [update.divisor for update in self._updates] or [self._assembly.divisor]
        return {
            **self._run.interval_metrics(),
            **self._run.record.keep_columns(batch),
            **batch,
            **self._assembly.metrics(),
            "train/gradient_scale": statistics.fmean(1.0 / divisor for divisor in divisors),
            **self.times.metrics(),
            **{f"loss/{key}": 0.0 for key in (*_ALWAYS_LOGGED, *self._options.loss_object.diagnostics)},
            **{f"loss/{key}": value for key, value in self._report.losses(divisors).items()},
            **self._ratios,
            **{f"optimizer/{key}": value for key, value in _means(self._optimized).items()},
        }

    def _end_wait(self) -> None:
        """What passed was the wait for samples, but for what was waited at the barrier and for a publication."""
        waits = self._run.batches.take_waits()
        self._waits += waits
        barrier, published = sum(wait.seconds for wait in waits), self._run.admission.slot_wait.take()
        self.times.end("wait_for_samples", of_which={"barrier": barrier, "publication": published})
        for wait in waits:
            self._events.emit(BarrierOpened(time=anyio.current_time(), wait=wait))

    async def _assemble(self, groups: Sequence[Group], *, last: bool) -> list[TrainingSequence]:
        """Group by group: a batch of thousands is a second of work, and samples and tools are served in between."""
        sequences: list[TrainingSequence] = []
        for group in groups:
            sequences += self._assembly.add([group])
            self._batch.add(group)
            await anyio.lowlevel.checkpoint()
        if last:
            for waiting in self._assembly.finish():
                sequences += waiting
                await anyio.lowlevel.checkpoint()
        return sequences

    async def _update(self) -> None:
        """Make all updates of the batch but for the last step of the optimizer, with which all of them are committed.

        Until then nobody else sees a version of them: if the run ends in between, the step has not happened.
        """
        options, planned, settings = self._options, list[Update](), self._optimizer_settings()
        parts = group_parts(self._assembly.groups, minibatches=options.minibatches, epochs=options.epochs, n=self.n)
        for update in self._assembly.updates(parts):
            planned.append(replace(update, settings=settings))
            await anyio.lowlevel.checkpoint()
        if planned:
            await self._learner.prepare_step(distinct_sequences(planned), options.loss_object)
        for update in planned:
            if self._updates:
                self.times.end("forward_backward")
                self._run.between_updates = True
                try:
                    await self._optimize(self._updates[-1])
                except LearnerError:
                    async with self._written(self._updates, []):
                        raise
                self.times.end("optimizer")
            self._updates.append(update)
            for chunk in update.chunks:
                await self._backward(chunk, made=len(self._updates) - 1)

    def _optimizer_settings(self) -> OptimizerSettings:
        """The same for all updates of a batch: schedules count batches."""
        return self._options.optimizer.settings(self.n - 1, self._run.steps)

    async def _optimize(self, update: Update) -> None:
        assert update.settings is not None, "only a step that was refused is without them"
        started = anyio.current_time()
        self._optimized.append(await self._learner.optimizer_step(update.settings, divisor=update.divisor))
        self._optimizer_s += anyio.current_time() - started

    async def _backward(self, sequences: Sequence[TrainingSequence], *, made: int = 0) -> None:
        """One pass after ``made`` updates of this step."""
        started = anyio.current_time()
        result = await self._learner.forward_backward(sequences, self._options.loss_object, updates=made)
        if wrong := _not_finite(result):
            async with self._written(self._updates or [Update(chunks=self._chunks)], []):
                raise NonFiniteError(f"{wrong} in a pass of step {self.n}; no step was taken")
        self._report.record(sequences, result, update=made)
        now = anyio.current_time()
        self._events.emit(
            ChunkTrained(time=now, n=self.n, sequences=len(sequences), tokens=result.tokens, seconds=now - started)
        )

    def _written(
        self, updates: Sequence[Update], consumed: Sequence[GroupConsumed]
    ) -> AbstractAsyncContextManager[None]:
        """The block makes the step happen; it is on disk when the block is left, if anything is kept."""
        entry = self._run.record.entry(
            n=self.n,
            version=self._version,
            consumed=consumed,
            loss=self._options.loss_object,
            updates=updates,
        )
        return self._run.saver.step(entry)

    def _consumed(self) -> list[GroupConsumed]:
        """What becomes of the members of the batch."""
        now = anyio.current_time()
        events = []
        discards = self._options.completion.stragglers == "discard"
        for group in self.groups:
            dropped = Counter(member.dropped.value for member in group.members_G if member.dropped is not None)
            trained = len(group.members_G) - dropped.total()
            if discards:
                dropped[DropReason.STRAGGLER.value] += self._options.group_size - len(group.members_G)
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


def _not_finite(result: ChunkResult) -> str | None:
    """What a pass reported that no step may be made of, also where a loss masks such a token."""
    loss, unknown = result.sums.get("loss", 0.0), int(np.isnan(result.log_ratios).sum())
    if unknown:
        return f"the log-probability of {unknown} of {len(result.log_ratios)} trained tokens is nan"
    return None if math.isfinite(loss) else f"the loss is {loss}"


def _means(reports: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """What the optimizer said of the updates of a batch: the only report as it is, or the mean of all."""
    if len(reports) == 1:
        return reports[0]
    found = [numbers(report) for report in reports] or [{"grad_norm": 0.0, "lr": 0.0}]
    return {key: statistics.fmean(report[key] for report in found if key in report) for key in found[0]}
