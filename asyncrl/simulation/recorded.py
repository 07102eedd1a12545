"""A finished run's ``events.jsonl`` as a workload, and what the run itself achieved.

The file is read line by line. Unknown events and fields are ignored, and so is a last line that was cut short. Failed
attempts are left out of the scripts, but their requests count as load. Costs are those after the first steps, in which
everything is cold and an evaluation runs beside.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson

from asyncrl.errors import ConfigError
from asyncrl.simulation.cost import Array, Cost, InFlight, LoadModel, fit_cost, fit_load
from asyncrl.simulation.workload import (
    GroupScript,
    MemberScript,
    StepEnd,
    TurnScript,
    Workload,
    around_steady,
    steady_steps,
)

__all__ = ["EventFields", "Recording", "Transcripts", "read_run"]

EventFields: TypeAlias = Mapping[str, Any]
"""One line of ``events.jsonl``."""

_GROUPS = 4096
# Kept at most; when there are more, every other one goes, and from then on only every other one comes.


class Transcripts:
    """Owns the groups that are under way and those that ended, evenly over the run if they are too many."""

    def __init__(self) -> None:
        self._stride = 1
        self._active: dict[int, defaultdict[int, _Transcript]] = {}
        self._ended: defaultdict[int, dict[int, MemberScript]] = defaultdict(dict)
        self._groups: dict[int, GroupScript] = {}

    def groups(self) -> dict[int, GroupScript]:
        """The groups that ended, by and in the order of their admission."""
        return dict(sorted(self._groups.items()))

    def on_segment_sampled(self, event: EventFields) -> None:
        """A request of a trajectory was answered."""
        if event["group"] % self._stride == 0:
            self._active.setdefault(event["group"], defaultdict(_Transcript))[event["member"]].segment(event)

    def on_tool_called(self, event: EventFields) -> None:
        """The environment has answered, so the turn was complete."""
        transcript = self._active.get(event["group"], {}).get(event["member"])
        if transcript is not None:
            transcript.turn_over = True

    def on_member_failed(self, event: EventFields) -> None:
        """An attempt is no trajectory."""
        self._active.get(event["group"], {}).pop(event["member"], None)

    def on_member_finished(self, event: EventFields) -> None:
        """With a reward, or discarded as a straggler: then it did not end by itself."""
        transcript = self._active.get(event["group"], {}).pop(event["member"], None)
        if transcript is not None:
            self._ended[event["group"]][event["member"]] = transcript.script(
                time=event["time"],
                reward=event.get("reward") or 0.0,
                truncated=event["event"] == "member_discarded" or bool(event.get("truncated")),
            )

    on_member_discarded = on_member_finished

    def on_group_finished(self, event: EventFields) -> None:
        """All members ended: keep the group's scripts."""
        members = self._ended.pop(event["group"], {})
        self._active.pop(event["group"], None)
        if members:
            self._groups[event["group"]] = GroupScript(members=tuple(members[place] for place in sorted(members)))
        if len(self._groups) > _GROUPS:
            self._stride *= 2
            self._groups = {index: group for index, group in self._groups.items() if index % self._stride == 0}


class _Transcript:
    """A trajectory that is under way."""

    def __init__(self) -> None:
        self.turn_over = True
        self._turns: list[TurnScript] = []
        self._context = 0
        self._answered = 0.0

    def segment(self, event: EventFields) -> None:
        """Another request was answered."""
        prompt, tokens = event["prompt_tokens"], event["tokens"]
        if self.turn_over:
            new = max(0, prompt - self._context)
            # A prefix that was computed anew for other weights is decided again by the simulated run.
            uncached = new if event.get("refilled") else max(0, prompt - event["cached_tokens"])
            self._reply_until(event["time"] - event["seconds"] - event["queue_seconds"])
            self._turns.append(TurnScript(new_tokens=new, uncached_tokens=uncached, tokens=tokens, reply_s=0.0))
        else:
            self._turns[-1] = replace(self._turns[-1], tokens=self._turns[-1].tokens + tokens)
        self._context = prompt + tokens
        self._answered = event["time"]
        self.turn_over = False

    def script(self, *, time: float, reward: float, truncated: bool) -> MemberScript:
        """The whole trajectory, which ended at ``time``."""
        self._reply_until(time)
        return MemberScript(turns=tuple(self._turns), reward=reward, truncated=truncated)

    def _reply_until(self, time: float) -> None:
        if self._turns:
            self._turns[-1] = replace(self._turns[-1], reply_s=max(0.0, time - self._answered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a run's events say."""

    workload: Workload
    steps: tuple[StepEnd, ...]
    max_staleness: int
    groups_per_step: int
    group_size: int
    """The largest of the run."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The bound on staleness, groups of a step and trajectories of a group."""
        return self.max_staleness, self.groups_per_step, self.group_size


def read_run(directory: Path) -> Recording:
    """Read ``directory/events.jsonl``. Raises ``ConfigError`` if it is missing, unreadable or without a whole step."""
    path = directory / "events.jsonl"
    reader = _Reader()
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if line.endswith(b"\n"):
                    reader.read(orjson.loads(line))
    except OSError as error:
        raise ConfigError(f"--from is {str(directory)!r}, but {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--from: line {number} of {path} is no event of a run: {error!r}") from error
    if not reader.steps:
        raise ConfigError(f"--from is {str(directory)!r}, but the run finished no step")
    recording = reader.recording()
    if not recording.workload.groups:
        raise ConfigError(f"--from is {str(directory)!r}, but the run finished no group")
    return recording


class _Intervals:
    """Owns when something was done, and of which sizes."""

    def __init__(self, columns: int) -> None:
        self._columns = tuple(array("d") for _ in range(2 + columns))

    def add(self, started: float, ended: float, *sizes: float) -> None:
        """It was done from ``started`` to ``ended``."""
        for column, value in zip(self._columns, (started, ended, *sizes), strict=True):
            column.append(value)

    def since(self, time: float) -> tuple[Array, Array, Array]:
        """Starts (N,), ends (N,) and sizes (N, K) of those that began at ``time`` or later."""
        table = np.array(self._columns, dtype=np.float64)
        started, ended, *sizes = table[:, (table[0] >= time) & (table[1] > table[0])]
        return started, ended, np.stack(sizes, axis=1)


class _Reader:
    """Owns what was read so far. Here and in ``Transcripts``, ``on_NAME`` takes note of the event of that name."""

    def __init__(self) -> None:
        self.steps: list[StepEnd] = []
        self._transcripts = Transcripts()
        # Sizes: 1, tokens, uncached tokens; 1, sequences, tokens; for the others 1.
        self._requests = _Intervals(3)
        self._passes = _Intervals(3)
        self._optimizer, self._staging, self._publication = _Intervals(1), _Intervals(1), _Intervals(1)
        self._admitted: dict[int, float] = {}
        self._reset_s = np.inf
        self._max_staleness = 0
        self._batches: defaultdict[int, int] = defaultdict(int)
        self._taken: float | None = None
        self._committed: float | None = None

    def read(self, event: EventFields) -> None:
        """Take note of one event."""
        for owner in (self, self._transcripts):
            handler: Callable[[EventFields], None] | None = getattr(owner, f"on_{event['event']}", None)
            if handler is not None:
                handler(event)

    def recording(self) -> Recording:
        """The whole run."""
        scripts = self._transcripts.groups()
        groups = list(scripts.values())
        size = max(self._batches.values(), default=0)
        before, after = around_steady(self._max_staleness)
        steady = steady_steps(len(self.steps), self._max_staleness)
        warm = self.steps[steady[0] - 1].time if steady else -np.inf
        started, ended, _ = self._requests.since(-np.inf)
        in_flight = InFlight(started, ended)
        return Recording(
            workload=Workload(
                groups=groups,
                sampling=_load(self._requests, in_flight, warm),
                training=_cost(self._passes, in_flight, warm),
                optimizer=_cost(self._optimizer, in_flight, warm),
                staging=_cost(self._staging, in_flight, warm),
                publication=_load(self._publication, in_flight, warm),
                reset_s=self._reset_s if np.isfinite(self._reset_s) else 0.0,
                margins=(
                    sum(index < before * size for index in scripts),
                    sum(index >= (len(self.steps) - after) * size for index in scripts),
                ),
            ),
            steps=tuple(self.steps),
            max_staleness=self._max_staleness,
            groups_per_step=size,
            group_size=max((len(group.members) for group in groups), default=0),
        )

    def on_group_admitted(self, event: EventFields) -> None:
        self._admitted[event["group"]] = event["time"]

    def on_group_born(self, event: EventFields) -> None:
        self._max_staleness = max(self._max_staleness, event["due"] - event["version"])
        admitted = self._admitted.pop(event["group"], None)
        if admitted is not None:
            # Of all groups the one that waited the least for a slot.
            self._reset_s = min(self._reset_s, event["time"] - admitted)

    def on_segment_sampled(self, event: EventFields) -> None:
        uncached = event["prompt_tokens"] - event["cached_tokens"]
        self._requests.add(event["time"] - event["seconds"], event["time"], 1, event["tokens"], uncached)

    def on_batch_taken(self, event: EventFields) -> None:
        self._batches[event["n"]] += len(event["groups"])
        self._taken = event["time"]

    def on_chunk_trained(self, event: EventFields) -> None:
        # From the taking of the batch, so that making sequences of it counts.
        started = event["time"] - event["seconds"] if self._taken is None else self._taken
        self._passes.add(started, event["time"], 1, event["sequences"], event["tokens"])

    def on_learner_stepped(self, event: EventFields) -> None:
        self._optimizer.add(event["time"] - event["seconds"], event["time"], 1)
        self._committed = event["time"]

    def on_version_published(self, event: EventFields) -> None:
        self._publication.add(event["time"] - event["seconds"], event["time"], 1)

    def on_evaluation_finished(self, event: EventFields) -> None:
        # Staging ended before it, but nothing says when.
        self._committed = None

    def on_step_finished(self, event: EventFields) -> None:
        if self._committed is not None:
            self._staging.add(self._committed, event["time"], 1)
        evaluation_s = event.get("metrics", {}).get("evaluation/seconds") or 0.0
        self.steps.append(StepEnd(time=event["time"], evaluation_s=evaluation_s))
        self._taken = self._committed = None


def _cost(intervals: _Intervals, in_flight: InFlight, since: float) -> Cost:
    started, ended, sizes = intervals.since(since)
    return fit_cost(sizes, ended - started, busy=in_flight.busy(started, ended))


def _load(intervals: _Intervals, in_flight: InFlight, since: float) -> LoadModel:
    started, ended, sizes = intervals.since(since)
    return fit_load(sizes, ended - started, in_flight.mean(started, ended))
