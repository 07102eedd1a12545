"""What the loops of a run share: the owners of its state, made once, and what surrounds the loops.

The loops themselves, and the picture of them, are in ``trainer.py``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

from asyncrl.concurrency.endings import FirstError, FirstErrorStack
from asyncrl.events import GroupBorn, Notice, Underway
from asyncrl.observe.lag import settled_heap
from asyncrl.rollout.border import shared_parts
from asyncrl.rollout.engine import EngineSession
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.batches import Batches
from asyncrl.training.observers import RunObservers
from asyncrl.training.options import TrainingOptions
from asyncrl.training.record import RunRecord
from asyncrl.training.saving import Saver
from asyncrl.types import Group, Row

__all__ = ["TrainingRun"]


class TrainingRun:
    """The owners of a run's state, and what happens around its loops. It is for one run of ``steps`` steps."""

    def __init__(
        self, options: TrainingOptions, session: EngineSession, rows: Sequence[Row], steps: int, saver: Saver
    ) -> None:
        self.options = options
        self.events = options.events
        self.clock = session.clock
        self.rows = rows
        self.steps = steps
        self.saver = saver
        self.admission = Admission(
            slots=options.engine.schedule.slots(
                groups_per_step=options.groups_per_step, max_staleness=options.max_staleness, updates=options.updates
            ),
            max_staleness=options.max_staleness,
            updates=options.updates,
            group_size=options.group_size,
            groups=steps * options.groups_per_step,
            rows=math.inf if options.repeat_dataset else len(rows),
        )
        self.session = session.for_training(self._birth, self.admission.published, resumable=saver.resumable)
        self.batches = Batches(
            admission=self.admission,
            clock=self.clock,
            groups_per_step=options.groups_per_step,
            updates=options.updates,
            order=options.batch_order,
            bounded=options.stale_rule.bounded,
            split_size=options.group_size if options.completion.stragglers == "carry_over" else None,
        )
        self.observers = RunObservers(options, session, saver.state)
        self.record = RunRecord(
            self.admission,
            self.batches,
            self.observers.ledger,
            self.observers.recorder,
            self.clock,
            self.observers.untrained,
        )
        self.record.restore(saver.state)
        self.between_updates = False
        """True while the learner has made some updates of a batch and not all: its parameters are of no version."""
        self.first_error = FirstError()
        self._first_drop: BaseException | None = None
        # Why the first group that was dropped had failed.

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[TaskGroup, None]:
        """The task group for the run's loops, observed and saved. They are cancelled at the end of the block."""
        for name, reason in (*self.options.possible_losses(), *shared_parts(self.rows[0])):
            self.events.emit(Notice(time=anyio.current_time(), name=name, level="warning", keys={"reason": reason}))
        async with FirstErrorStack() as end:
            self.observers.subscribe(end)
            end.push_async_callback(self._save_at_end)
            with settled_heap(), self.first_error.raised():
                async with anyio.create_task_group() as tasks:
                    self.observers.start(tasks)
                    self.saver.save_regularly(tasks, self.record.state)
                    with self.first_error.watched():
                        yield tasks
                    tasks.cancel_scope.cancel()

    async def roll_out(self, group: int) -> None:
        """Run a group that was admitted, until it is ready for a batch or is dropped."""
        with self.first_error.watched():
            finished = await self.session.group(
                group,
                self.rows[group % len(self.rows)],
                self.options.group_size,
                completion=self.options.completion,
                on_part=self.batches.put,
                on_reroll=self._renew,
                progress=self.record.progress(group),
            )
        if isinstance(finished, Group):
            self.record.finish(group)
            self.batches.put(finished)
            return
        self._first_drop = self._first_drop or finished.error
        self.batches.drop(group)
        event = finished.event()
        self.record.drop(group, str(event.reason))
        self.events.emit(event)

    async def evaluate(self, n: int) -> float:
        """Measure the committed policy, if that is due after step ``n``, and say how many seconds it took."""
        evaluator = self.options.evaluator
        if evaluator is None or not evaluator.due(n, self.steps) or self.saver.evaluated >= n:
            return 0.0  # the last: by an earlier process
        started = anyio.current_time()
        self.events.emit(Underway(time=started, what="measuring the held-out rows"))
        await self.clock.wait_published(self.clock.committed)
        await evaluator.evaluate(self.session, n=n)
        await self.saver.note_evaluated(n)
        return anyio.current_time() - started

    async def save_weights(self, *, at_once: bool = False) -> None:
        """Save the committed parameters, if that is due or wanted ``at_once``."""
        learner, n = self.session.policy.learner, self.record.n
        await self.saver.save_weights(learner, n=n, version=self.clock.committed, at_once=at_once)

    async def end(self, n: int) -> None:
        """The last step was ``n``. Raises what made the first group fail, if there was no step because all did, and
        ``NothingTrained`` if no step made a version.
        """
        if n == 0 and self._first_drop is not None:
            raise self._first_drop
        await self.clock.wait_published(self.clock.committed)
        await self.save_weights(at_once=True)
        self.observers.untrained.end(n, self.clock.committed, self._first_drop)

    def require_sense(self) -> None:
        """Raise what has gone wrong for too many steps: a function of the environment, or that nothing is trained."""
        error = self.session.context.failures.step_ended()
        if error is not None:
            raise error
        self.observers.untrained.require_some()

    async def _save_at_end(self) -> None:
        lost = self.between_updates or self.first_error.error is not None
        await self.saver.save_at_end(self.record.state, None if lost else self.session.policy.learner)

    def interval_metrics(self) -> Mapping[str, float]:
        """What happened since the last call, and how things stand now."""
        return self.observers.take(
            {
                "sampling/inflight_requests": float(self.session.context.requests.in_use),
                "staleness/reserved_groups": float(self.admission.outstanding),
                "throughput/queue_depth": float(self.session.context.requests.waiting),
                **self.saver.metrics(),
            }
        )

    def _renew(self, group: int) -> None:
        self.batches.renew(group)
        self.record.renew(group)

    def _birth(self, group: int, version: int) -> None:
        due = self.admission.birth(group, version)
        if due is not None:
            self.events.emit(GroupBorn(time=anyio.current_time(), group=group, version=version, due=due))
