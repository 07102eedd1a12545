"""One run: sample, wait for the barrier, train, commit, publish, again.

Four loops run beside each other in one task group; their only shared state is the owners in ``scheduling``::

    loop        consumes              produces            waits for                       unblocked by
    admission   rows                  groups (tasks)      a slot                          publication, a dropped group
    group       a reservation         a finished group    its members                     sampler and environment
    trainer     a batch of groups     a version           enough groups, and the barrier  a finished group
    publisher   a staged version      a published one     the servers                     their acknowledgement

The trainer's steps are in lock-step with the caller's loop: the next one starts when the caller asks for it. Sampling
does not wait for the caller. ``max_staleness=0`` needs no mode: its slots admit the current batch only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.concurrency.endings import Endings, FirstError, WhenBegun, noted
from asyncrl.concurrency.iteration import Consumer
from asyncrl.events import GroupAdmitted, GroupBorn, Notice, StepFinished
from asyncrl.observe.lag import LoopLag, settled_heap
from asyncrl.observe.metrics import COUNTED, MetricsRecorder
from asyncrl.observe.untrained import Untrained
from asyncrl.observe.watchdog import WATCHED, Watchdog
from asyncrl.plain import numbers
from asyncrl.rollout.border import shared_parts
from asyncrl.rollout.engine import EngineSession, RolloutEngine
from asyncrl.rollout.progress import GroupProgress
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.scheduling.ledger import ENTERED
from asyncrl.training.evaluation import Evaluator
from asyncrl.training.plan import TrainingPlan, possible_losses
from asyncrl.training.record import RunRecord, restored_ledger
from asyncrl.training.saving import Saver
from asyncrl.training.step import TrainerStep
from asyncrl.types import Group, Row, Step

__all__ = ["TrainingRun"]


class TrainingRun:
    """The owners of a run's state, and the loops around them. ``run`` it once."""

    def __init__(
        self,
        plan: TrainingPlan,
        session: EngineSession,
        engine: RolloutEngine,
        rows: Sequence[Row],
        steps: int,
        evaluator: Evaluator | None,
        saver: Saver,
    ) -> None:
        self.plan = plan
        self.clock = session.clock
        self.events = session.events
        self.rows = rows
        self.steps = steps
        self.evaluator = evaluator
        self.admission = Admission(
            slots=engine.schedule.slots(groups_per_step=plan.groups_per_step, max_staleness=plan.max_staleness),
            max_staleness=plan.max_staleness,
            group_size=plan.group_size,
            groups=steps * plan.groups_per_step,
            rows=math.inf if plan.repeat_dataset else len(rows),
        )
        self.session = session.for_training(self._birth, self.admission.published, resumable=saver.resumable)
        self.batches = Batches(
            admission=self.admission,
            clock=self.clock,
            groups_per_step=plan.groups_per_step,
            order=plan.batch_order,
            bounded=plan.stale_rule.bounded,
            split_size=plan.group_size if plan.completion.stragglers == "carry_over" else None,
        )
        self.first_error = FirstError()
        self.first_drop: BaseException | None = None
        # Why the first dropped group failed.
        self.recorder = MetricsRecorder(started=anyio.current_time())
        self.saver = saver
        self.ledger = restored_ledger(saver.state)
        self.lag = LoopLag(self.events)
        self.watchdog = Watchdog(
            self.events, session.activities, groups_per_step=plan.groups_per_step, servers=session.policy.sampler
        )
        self.untrained = Untrained(
            self.events,
            most=engine.failures.untrained_batches,
            oldest_age=plan.max_staleness if plan.stale_rule.masked else None,
            batches=saver.state.untrained,
        )
        self.record = RunRecord(self.admission, self.batches, self.ledger, self.recorder, self.clock, self.untrained)
        self.record.restore(saver.state)

    async def run(self, consumer: Consumer[Step]) -> None:
        """All loops, until the last step was handed over."""
        self._warn()
        # As many versions may wait for publication as the bound allows the trainer to be ahead.
        staged, versions = anyio.create_memory_object_stream[int](max(1, self.plan.max_staleness))
        async with Endings() as end:
            end.callback(self.events.subscribe(self.ledger.observe, kinds=ENTERED))
            end.callback(self.events.subscribe(self.recorder.observe, kinds=COUNTED))
            end.callback(self.events.subscribe(self.watchdog.observe, kinds=WATCHED))
            end.callback(self.ledger.close)
            end.push_async_callback(self.saver.save_at_end, self.record.state)
            with staged, versions, settled_heap(), self.first_error.raised():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(WhenBegun, self._publish, versions)
                    tasks.start_soon(WhenBegun, self._admit)
                    tasks.start_soon(WhenBegun, self.lag.run)
                    tasks.start_soon(WhenBegun, self.watchdog.run)
                    self.saver.save_regularly(tasks, self.record.state)
                    with self.first_error.watched():
                        await self._train(consumer, staged)
                    tasks.cancel_scope.cancel()

    async def _train(self, consumer: Consumer[Step], staged: MemoryObjectSendStream[int]) -> None:
        await self._evaluate(self.record.n)
        for n in range(self.record.n + 1, self.steps + 1):
            await consumer.wanted()
            step = await self._step(n, staged)
            if step is None:
                self._require_a_step(n)
                break  # the rows that were left failed
            await consumer.give(step)
            self.untrained.require_some()
        self.untrained.end(self.clock.committed)
        await self.clock.wait_published(self.clock.committed)
        await self._save_weights(at_once=True)

    def _require_a_step(self, n: int) -> None:
        """A run whose rows all failed has nothing to show but why."""
        if n == 1 and self.first_drop is not None:
            raise self.first_drop

    def _warn(self) -> None:
        """Say once what the chosen rules can lose."""
        for name, reason in (*possible_losses(self.plan), *shared_parts(self.rows[0])):
            self.events.emit(Notice(time=anyio.current_time(), name=name, level="warning", keys={"reason": reason}))

    async def _admit(self) -> None:
        async with anyio.create_task_group() as tasks:
            for group in sorted(self.record.progress):
                tasks.start_soon(WhenBegun, self._roll_out, group)  # an earlier process had admitted it
                await anyio.lowlevel.checkpoint()
            while True:
                # Waits on when all are admitted, for one that has to be replaced; the end of the run ends it.
                group = await self.admission.admit()
                self.events.emit(GroupAdmitted(time=anyio.current_time(), group=group))
                tasks.start_soon(WhenBegun, self._roll_out, group)
                # One group in a turn of the loop: a publication frees slots for hundreds, and their members starting
                # all at once would keep every tool and sample waiting.
                await anyio.lowlevel.checkpoint()

    async def _roll_out(self, group: int) -> None:
        row = self.rows[group % len(self.rows)]
        with self.first_error.watched():
            finished = await self.session.group(
                group,
                row,
                self.plan.group_size,
                completion=self.plan.completion,
                on_part=self.batches.put,
                on_reroll=self._renew,
                progress=self.record.progress.setdefault(group, GroupProgress()),
            )
        self.record.progress.pop(group, None)
        if isinstance(finished, Group):
            self.batches.put(finished)
            return
        self.first_drop = self.first_drop or finished.error
        self.batches.drop(group)
        event = finished.event()
        self.record.drop(group, str(event.reason))
        self.events.emit(event)

    def _renew(self, group: int) -> None:
        self.batches.renew(group)
        self.record.renew(group)

    def _birth(self, group: int, version: int) -> None:
        due = self.admission.birth(group, version)
        if due is not None:
            self.events.emit(GroupBorn(time=anyio.current_time(), group=group, version=version, due=due))

    async def _publish(self, versions: MemoryObjectReceiveStream[int]) -> None:
        async for version in versions:
            with self.first_error.watched():
                await self.session.publish(version)

    async def _step(self, n: int, staged: MemoryObjectSendStream[int]) -> Step | None:
        """The step, or None if there are no groups left for one."""
        step = TrainerStep(n, self.plan, self.session, self.admission, self.batches, self.record, self.saver)
        try:
            made_version = await step.run(self.plan.groups_per_step, steps=self.steps)
            if not step.groups:
                return None
            self.untrained.add(step.groups, version=step.version, made_version=made_version)
            if made_version:
                await staged.send(self.clock.committed)
                step.times.end("publication")
                await self._save_weights()
                step.times.end("optimizer")  # and what keeps its result
            evaluated = await self._evaluate(n)
        except BaseException as error:
            if step.is_committed:
                with noted(error):
                    self._finish(step, 0.0)  # it has happened, also if nobody gets it any more
            raise
        return self._finish(step, evaluated)

    def _finish(self, step: TrainerStep, evaluated: float) -> Step:
        n = step.n
        # A learner of the user's own reports what it likes; a logger gets floats.
        metrics = numbers({**self._metrics(step), "evaluation/seconds": evaluated})
        self.events.emit(StepFinished(time=anyio.current_time(), n=n, model_step=self.clock.committed, metrics=metrics))
        trajectories = [member for group in step.groups for member in group.members_G]
        return Step(n=n, model_step=self.clock.committed, metrics=metrics, trajectories=trajectories, waits=step.waits)

    def _metrics(self, step: TrainerStep) -> dict[str, float]:
        self.recorder.waste(step.assembly.wasted_tokens)
        gauges = {
            "sampling/inflight_requests": float(self.session.requests_in_flight),
            "staleness/reserved_groups": float(self.admission.outstanding),
            "throughput/queue_depth": float(self.session.requests_queued),
            **self.ledger.metrics(),
            **self.saver.metrics(),
            **self.lag.take(),
        }
        batch = step.batch.metrics()
        return {
            **self.recorder.take(anyio.current_time(), gauges),
            **self.record.keep_columns(batch),
            **batch,
            **step.metrics(),
        }

    async def _save_weights(self, *, at_once: bool = False) -> None:
        learner = self.session.policy.learner
        await self.saver.save_weights(learner, n=self.record.n, version=self.clock.committed, at_once=at_once)

    async def _evaluate(self, n: int) -> float:
        """Measure the committed policy, if that is due after step ``n``, and say how many seconds it took."""
        if self.evaluator is None or not self.evaluator.due(n, self.steps):
            return 0.0
        if self.saver.evaluated >= n:
            return 0.0  # by an earlier process
        started = anyio.current_time()
        await self.clock.wait_published(self.clock.committed)
        await self.evaluator.evaluate(self.session)
        await self.saver.note_evaluated(n)
        return anyio.current_time() - started
