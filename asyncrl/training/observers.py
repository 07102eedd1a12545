"""What looks at a run while it goes on: the ledger, the metrics, the watchdog, the loop's lag, and untrained batches.

None of them changes what is sampled or trained. The ledger and too many untrained batches can end the run.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
from anyio.abc import TaskGroup

from asyncrl.checkpoint.state import RunState
from asyncrl.concurrency.endings import FirstErrorStack, LazyCoroutine
from asyncrl.observe.lag import LoopLag
from asyncrl.observe.metrics import COUNTED, MetricsRecorder
from asyncrl.observe.untrained import Untrained
from asyncrl.observe.watchdog import WATCHED, Watchdog
from asyncrl.rollout.engine import EngineSession
from asyncrl.scheduling.ledger import ENTERED
from asyncrl.training.options import TrainingOptions
from asyncrl.training.record import restored_ledger

__all__ = ["RunObservers"]


class RunObservers:
    """Made once for each run; ``state`` is where the run goes on. They see what happens after ``subscribe``."""

    def __init__(self, options: TrainingOptions, session: EngineSession, state: RunState) -> None:
        self.ledger = restored_ledger(state)
        self.recorder = MetricsRecorder(started=anyio.current_time())
        self.untrained = Untrained(
            options.events,
            most=options.engine.failures.untrained_batches,
            oldest_age=options.max_staleness if options.stale_rule.masked else None,
            batches=state.untrained,
        )
        self._events = options.events
        self._lag = LoopLag(options.events)
        self._watchdog = Watchdog(
            options.events,
            session.context.activities,
            groups_per_step=options.groups_per_step,
            sampler=session.policy.sampler,
        )

    def subscribe(self, end: FirstErrorStack) -> None:
        """Look at the events of the run until ``end``, which closes the ledger."""
        end.callback(self._events.subscribe(self.ledger.observe, kinds=ENTERED))
        end.callback(self._events.subscribe(self.recorder.observe, kinds=COUNTED))
        end.callback(self._events.subscribe(self._watchdog.observe, kinds=WATCHED))
        end.callback(self.ledger.close)

    def start(self, tasks: TaskGroup) -> None:
        """Look at the loop and at what does not happen, until ``tasks`` are cancelled."""
        tasks.start_soon(LazyCoroutine, self._lag.run)
        tasks.start_soon(LazyCoroutine, self._watchdog.run)

    def take(self, gauges: Mapping[str, float]) -> Mapping[str, float]:
        """The metrics since the last call; ``gauges`` are values that only their owners know, read now."""
        now = anyio.current_time()
        return self.recorder.take(now, {**gauges, **self.ledger.metrics(), **self._lag.take()})
