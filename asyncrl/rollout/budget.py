"""The budget of one trajectory: how much it may still sample, and why it stops when nothing is left.

Pure rules over the counters of a ``Trajectory``. No request ever asks for more tokens than the turn, the generation and
the context have left, so a resumed or aborted turn can never exceed its bound. Waiting and sampling are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from asyncrl.errors import ConfigError
from asyncrl.rollout.toolcalls import ParsedTurn
from asyncrl.types import StopReason, Trajectory, TruncationCause

__all__ = ["Budget"]


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
            value = getattr(self, field.name)
            if field.name == "max_turn_tokens" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError.for_value(f"budget.{field.name}", value, "a positive integer")

    def within(self, context_tokens: int | None) -> Budget:
        """The same budget for servers that have room for ``context_tokens`` only; None: they have room for anything.

        What does not fit then ends as truncated by its context, instead of being refused by a server.
        """
        if context_tokens is None or context_tokens >= self.max_context_tokens:
            return self
        return replace(self, max_context_tokens=context_tokens)

    def next_segment(self, traj: Trajectory, turn_cap: int | None = None) -> int | TruncationCause:
        """Tokens to ask for next, at least 1, or why the trajectory ends here. Ask only while the turn is open.

        ``turn_cap`` replaces ``max_turn_tokens`` for this turn.
        """
        generation_left = self.max_generated_tokens - traj.generated_tokens
        context_left = self.max_context_tokens - traj.context_tokens
        if generation_left <= 0:
            return TruncationCause.GENERATED_TOKENS
        if context_left <= 0:
            return TruncationCause.CONTEXT
        wanted = min(generation_left, context_left, self.segment_tokens)
        cap = self._turn_cap(turn_cap)
        return wanted if cap is None else min(wanted, cap - traj.turn_tokens)

    def turn_complete(self, traj: Trajectory, turn_cap: int | None = None) -> bool:
        """True if the model ended its message, or the turn has all the tokens that it may have."""
        if traj.stop is StopReason.STOP:
            return True
        cap = self._turn_cap(turn_cap)
        return cap is not None and traj.turn_tokens >= cap

    def answered(self, parsed: ParsedTurn) -> ParsedTurn:
        """The turn with as many calls as are run, and one that says of the others that they are not.

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

    def _turn_cap(self, turn_cap: int | None) -> int | None:
        return self.max_turn_tokens if turn_cap is None else turn_cap
