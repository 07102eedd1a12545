"""The budget of one trajectory: how much it may still sample, why it stops when nothing is left, and where a turn ends.

Pure rules over a ``Trajectory``. No request ever asks for more tokens than the turn, the generation and the context
have left, so a resumed or aborted turn can never exceed its bound. Waiting and sampling are left out.

Stop strings count over the whole turn, however many requests it took. A server looks for them in the tokens of one
request, and some servers only in the last few of those. What it cannot see is found here: the segment is cut behind the
token that completes the string, as a server does, and the turn is complete. What was sampled beyond that token is not
kept. Costs nothing without stop strings.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from asyncrl.errors import require_count
from asyncrl.rollout.renderer import Renderer
from asyncrl.rollout.toolcalls import ParsedTurn
from asyncrl.types import IntArray, Segment, StopReason, Trajectory, TruncationCause

__all__ = ["Budget", "cut_at_stop"]

_BYTES = 4
# Of a character, at most; a token has at least one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bounds of one trajectory; all are positive.

    Example: of a turn capped at 10 tokens, 7 came back before the request was aborted; the next one asks for 3::

        Budget(max_turn_tokens=10).next_segment(traj)  # traj.turn_tokens == 7
    """

    max_turns: int = 8
    """Model messages. The environment answers the last one too, so that a tool call in it still runs."""
    max_generated_tokens: int = 32_768
    """Sampled tokens over all turns."""
    max_context_tokens: int = 131_072
    """Prompt, sampled tokens and framing together."""
    segment_tokens: int = 4096
    """Most tokens of one sampling request: a longer turn takes several, and may change policy version in between."""
    max_turn_tokens: int | None = None
    """Sampled tokens of one turn; it is then complete as it stands. None: bounded by the rest of the budget only."""
    tool_output_tokens: int = 4096
    """Longest tool result; what is longer loses its middle."""
    max_turn_calls: int = 64
    """Tool calls of one turn that are run; the others get one short answer together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "max_turn_tokens" or self.max_turn_tokens is not None:
                require_count(f"budget.{field.name}", getattr(self, field.name), least=1)

    def within(self, context_tokens: int | None) -> Budget:
        """The same budget for servers that have room for ``context_tokens`` only; None: they have room for anything.

        What does not fit then ends as truncated by its context, instead of being refused by a server.
        """
        if context_tokens is None or context_tokens >= self.max_context_tokens:
            return self
        return replace(self, max_context_tokens=context_tokens)

    def next_segment(self, traj: Trajectory) -> int | TruncationCause:
        """Tokens to ask for next, at least 1, or why the trajectory ends here. Ask only while the turn is open."""
        generation_left = self.max_generated_tokens - traj.generated_tokens
        context_left = self.max_context_tokens - traj.context_tokens
        if generation_left <= 0:
            return TruncationCause.GENERATED_TOKENS
        if context_left <= 0:
            return TruncationCause.CONTEXT
        wanted = min(generation_left, context_left, self.segment_tokens)
        cap = self._turn_cap(traj)
        return wanted if cap is None else min(wanted, cap - traj.turn_tokens)

    def turn_complete(self, traj: Trajectory) -> bool:
        """True if the model ended its message, or the turn has all the tokens that it may have."""
        if traj.stop is StopReason.STOP:
            return True
        cap = self._turn_cap(traj)
        return cap is not None and traj.turn_tokens >= cap

    def limit_calls(self, parsed: ParsedTurn) -> ParsedTurn:
        """The turn with the first ``max_turn_calls`` of its calls, and one whose error says how many were left out.

        A model that repeats itself can write ten thousand calls into a turn.
        """
        if len(parsed.tool_calls) <= self.max_turn_calls:
            return parsed
        calls, most = parsed.tool_calls, self.max_turn_calls
        left_out = len(calls) - most
        error = f"at most {most} calls of a turn are run; this one and those after it, {left_out} in all, were left out"
        kept = (*calls[:most], replace(calls[most], arguments=None, error=error))
        answered = {call.id for call in kept}
        message = dict(parsed.message)
        if "tool_calls" in message:
            message["tool_calls"] = [call for call in message["tool_calls"] if call["id"] in answered]
        return ParsedTurn(message=message, tool_calls=kept)

    def after_turn(self, traj: Trajectory) -> TruncationCause | None:
        """Why no further turn may follow, although the environment wants one; None if it may."""
        return TruncationCause.TURNS if traj.turns >= self.max_turns else None

    def _turn_cap(self, traj: Trajectory) -> int | None:
        """``max_turn_tokens``, unless the environment has set another bound for this turn."""
        return self.max_turn_tokens if traj.turn_cap is None else traj.turn_cap


def cut_at_stop(segment: Segment, traj: Trajectory, renderer: Renderer) -> Segment:
    """``segment``, which follows the open turn of ``traj``, up to where a stop string or stop token ends that turn.

    Its ``stop`` is STOP if it completes the turn, also if the server was told to abort it in the same moment.
    """
    stopped = segment.stop is StopReason.STOP
    if (stopped and not renderer.stop) or not len(segment.tokens):
        return segment
    if renderer.stop:
        before = _tail(traj, _BYTES * (1 + max(map(len, renderer.stop))))
        kept = _completed(before, segment.tokens, renderer)
        if kept is not None:
            return segment if stopped and kept == len(segment.tokens) else segment.cut(kept)
    if not stopped and int(segment.tokens[-1]) in renderer.stop_token_ids:
        return segment.cut(len(segment.tokens))
    return segment


def _completed(before: IntArray, tokens: IntArray, renderer: Renderer) -> int | None:
    """How many of ``tokens`` it takes to complete a stop string; None if there is none."""
    joined = np.concatenate([before, tokens])
    found = partial(_has_stop, joined, len(before), renderer)
    if not found(len(tokens)):
        return None
    return bisect_left(range(1, len(tokens)), True, key=found) + 1


def _has_stop(joined: IntArray, before: int, renderer: Renderer, tokens: int) -> bool:
    text = renderer.text(joined[: before + tokens])
    return any(stop in text for stop in renderer.stop)


def _tail(traj: Trajectory, tokens: int) -> IntArray:
    """The last ``tokens`` of the open turn, or all of it. Looks at no more of the conversation than that."""
    left = min(tokens, traj.turn_tokens)
    parts: list[IntArray] = []
    for span in reversed(traj.spans):
        if left <= 0:
            break
        parts.append(span.tokens[-left:])
        left -= len(parts[-1])
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)
