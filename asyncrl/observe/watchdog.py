"""A warning when nothing happens for long: the few oldest things that are waited for, since when, on whom and where.

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

from asyncrl.concurrency.notifier import Notifier
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
from asyncrl.rollout.progress import Activities, Activity
from asyncrl.sampling.backend import SamplingBackend

__all__ = ["WATCHED", "Watchdog"]

_LEAST_S = 120.0
# Shorter silences are usual: one long request, one slow tool.
_STEPS = 3.0
_REMEMBERED = 16
_NAMED = 5
# Members in one notice: what holds one of them often holds others, and several can be stuck for reasons of their own.


class Watchdog:
    """Subscribe ``observe`` to ``WATCHED`` and start ``run`` in a task group."""

    def __init__(
        self, events: Events, activities: Activities, *, groups_per_step: int, sampler: SamplingBackend
    ) -> None:
        self._events = events
        self._activities = activities
        self._groups_per_step = groups_per_step
        self._sampler = sampler
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._last = 0.0
        # Loop time of the last event.
        self._spoke = False
        self._woken = Notifier()
        self._learner: tuple[float, str] | None = None
        # Since when it is waited for, and for what.
        self._taken = 0
        # Groups of the step under way.
        self._unpublished: dict[int, float] = {}
        # Committed version -> since when it, or the one before it, is being published.

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
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, event)

    def _step(self, event: StepFinished) -> None:
        self._step_seconds.append(event.metrics.get("train/batch_seconds", 0.0))
        self._learner = None
        self._taken = 0

    def _take(self, event: BatchTaken) -> None:
        self._taken += len(event.groups)
        self._learner = event.time, "the learner"

    def _train(self, event: ChunkTrained) -> None:
        # After a part of the batch, the rest of it is waited for.
        complete = self._taken >= self._groups_per_step
        self._learner = (event.time, "the learner's optimizer step") if complete else None

    def _rest(self, event: LearnerStepped) -> None:
        self._learner = None

    def _commit(self, event: VersionCommitted) -> None:
        self._unpublished[event.version] = event.time

    def _publish(self, event: VersionPublished) -> None:
        self._unpublished = {
            version: max(since, event.time) for version, since in self._unpublished.items() if version > event.version
        }

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
        waits = [self._of_member(activity) for activity in self._activities.oldest(_NAMED)]
        if self._learner is not None:
            since, words = self._learner
            waits.append((since, {"waits_for": words}))
        if self._unpublished:
            waits.append(self._of_publication(min(self._unpublished)))
        waits.sort(key=lambda wait: wait[0])
        (since, keys), *others = waits or [(self._last, {"waits_for": "the caller's loop"})]
        keys |= {"seconds": round(now - since, 1), "running_members": len(self._activities)}
        if others:
            keys["others"] = [_sentence(now - since, other) for since, other in others]
        return Notice(time=now, name="nothing_advances", level="warning", keys=keys)

    def _of_member(self, activity: Activity) -> tuple[float, dict[str, object]]:
        traj = activity.traj
        keys: dict[str, object] = {
            "waits_for": activity.words,
            "trajectory": traj.id,
            "group": traj.group,
            "member": traj.member,
            "attempt": traj.attempt,
            "turn": traj.turns if activity.doing == "on_turn" else traj.turns + 1,
        }
        if activity.doing == "sampling":
            server = self._sampler.server_of(traj.id)
            if server is not None:
                keys["server"] = server
            elif traj.server:
                keys["last_server"] = traj.server
        return activity.since, keys

    def _of_publication(self, version: int) -> tuple[float, dict[str, object]]:
        keys: dict[str, object] = {"waits_for": f"the publication of version {version}"}
        call = self._sampler.oldest_call()
        if call is not None:
            keys["call"] = call[1]
        return self._unpublished[version], keys


_HANDLERS: Mapping[type[Event], Callable[[Watchdog, Any], None]] = {
    StepFinished: Watchdog._step,
    BatchTaken: Watchdog._take,
    ChunkTrained: Watchdog._train,
    LearnerStepped: Watchdog._rest,
    VersionCommitted: Watchdog._commit,
    VersionPublished: Watchdog._publish,
}
WATCHED = (*_HANDLERS, GroupAdmitted, GroupBorn, GroupFinished)
"""The events to subscribe to. What single members do is in their activities."""


def _sentence(seconds: float, keys: Mapping[str, object]) -> str:
    words = [str(keys["waits_for"])]
    if "trajectory" in keys:
        words.append(f"of {keys['trajectory']} in turn {keys['turn']}")
    place = keys.get("server") or keys.get("call")
    if place is not None:
        words.append(f"at {place}")
    return f"{' '.join(words)}, for {seconds:.1f} s"
