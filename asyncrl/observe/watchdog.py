"""A word when nothing happens for long: what is waited for, since when, and on whom.

The run is silent for longer than usual when no event comes and no member begins to wait for anything new, for three
times the median step and at least two minutes. Steps are measured without evaluations and without what the caller does
in between. There is one notice for each silence; the next may come only after something has happened.

Nothing is polled: the watchdog sleeps until the silence would be long enough, and again if it was broken meanwhile.
When it has spoken it sleeps until an event wakes it, so that on a virtual clock a deadlock is still seen as one.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from asyncrl.events import (
    BatchTaken,
    ChunkTrained,
    Event,
    Events,
    GroupAdmitted,
    GroupBorn,
    GroupFinished,
    LearnerStepped,
    Notice,
    StepFinished,
    VersionCommitted,
    VersionPublished,
)
from asyncrl.rollout.activity import Activities
from asyncrl.scheduling.pulse import Pulse

__all__ = ["WATCHED", "Watchdog"]

WATCHED = (
    BatchTaken,
    ChunkTrained,
    GroupAdmitted,
    GroupBorn,
    GroupFinished,
    LearnerStepped,
    StepFinished,
    VersionCommitted,
    VersionPublished,
)
"""The events to subscribe to. What single members do is in their activities."""

_LEAST_S = 120.0
# Shorter silences are usual: one long request, one slow tool.
_STEPS = 3.0
_REMEMBERED = 16


class Watchdog:
    """Subscribe ``observe`` to ``WATCHED`` and start ``run`` in a task group."""

    def __init__(self, events: Events, activities: Activities) -> None:
        self._events = events
        self._activities = activities
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = 0.0
        # Loop time of the last event.
        self._spoke = False
        self._woken = Pulse()
        self._training_since: float | None = None
        self._publishing: tuple[int, float] | None = None
        self._handlers: Mapping[type[Event], Callable[[Any], None]] = {
            StepFinished: self._step,
            BatchTaken: self._train,
            ChunkTrained: self._train,
            VersionCommitted: self._commit,
            VersionPublished: self._publish,
        }

    @property
    def patience_s(self) -> float:
        """How long a silence has to be."""
        return max(_LEAST_S, _STEPS * statistics.median(self._step_seconds)) if self._step_seconds else _LEAST_S

    def observe(self, event: Event) -> None:
        """Something happened."""
        self._last = event.time
        if self._spoke:
            self._spoke = False
            self._woken.notify()
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _step(self, event: StepFinished) -> None:
        self._step_seconds.append(event.metrics.get("train/batch_seconds", 0.0))

    def _train(self, event: BatchTaken | ChunkTrained) -> None:
        self._training_since = event.time if isinstance(event, BatchTaken) else None

    def _commit(self, event: VersionCommitted) -> None:
        self._publishing = (event.version, event.time)

    def _publish(self, event: VersionPublished) -> None:
        if self._publishing is not None and self._publishing[0] <= event.version:
            self._publishing = None

    async def run(self) -> None:
        """Watch until cancelled."""
        self._last = anyio.current_time()
        while True:
            now = anyio.current_time()
            until = max(self._last, self._activities.changed) + self.patience_s
            if now < until:
                await anyio.sleep_until(until)
                continue
            self._events.emit(self._notice(now))
            self._spoke = True
            await self._woken.wait_until(lambda: not self._spoke)

    def _notice(self, now: float) -> Notice:
        waits: list[tuple[float, dict[str, object]]] = []
        oldest = self._activities.oldest
        if oldest is not None:
            traj = oldest.traj
            keys: dict[str, object] = {
                "waits_for": oldest.words,
                "trajectory": traj.id,
                "group": traj.group,
                "member": traj.member,
                "attempt": traj.attempt,
                "turn": traj.turns if oldest.doing == "reply" else traj.turns + 1,
            }
            if traj.server and oldest.doing == "sampling":
                keys["last_server"] = traj.server
            waits.append((oldest.since, keys))
        if self._training_since is not None:
            waits.append((self._training_since, {"waits_for": "the learner"}))
        if self._publishing is not None:
            version, since = self._publishing
            waits.append((since, {"waits_for": f"the publication of version {version}"}))
        waits = waits or [(self._last, {"waits_for": "the caller's loop"})]
        since, keys = min(waits, key=lambda wait: wait[0])
        keys |= {"seconds": round(now - since, 1), "running_members": len(self._activities)}
        return Notice(time=now, name="nothing_advances", level="warning", keys=keys)
