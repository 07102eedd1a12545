"""From events to scripts: what each trajectory of a recorded run did, group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript

__all__ = ["EventFields", "Transcripts"]

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

    def segment_sampled(self, event: EventFields) -> None:
        """A request of a trajectory was answered."""
        if event["group"] % self._stride == 0:
            self._active.setdefault(event["group"], defaultdict(_Transcript))[event["member"]].segment(event)

    def tool_called(self, event: EventFields) -> None:
        """The environment has answered, so the turn was complete."""
        transcript = self._active.get(event["group"], {}).get(event["member"])
        if transcript is not None:
            transcript.turn_over = True

    def member_failed(self, event: EventFields) -> None:
        """An attempt is no trajectory."""
        self._active.get(event["group"], {}).pop(event["member"], None)

    def member_ended(self, event: EventFields) -> None:
        """With a reward, or discarded as a straggler: then it did not end by itself."""
        transcript = self._active.get(event["group"], {}).pop(event["member"], None)
        if transcript is not None:
            self._ended[event["group"]][event["member"]] = transcript.script(
                time=event["time"],
                reward=event.get("reward") or 0.0,
                truncated=event["event"] == "member_discarded" or bool(event.get("truncated")),
            )

    def group_finished(self, event: EventFields) -> None:
        """All members ended."""
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
