"""Playing scripts back: the environment and the renderer of a simulated run.

Tokens have no content here, only numbers. All arrays are views of one buffer, so that a context of a hundred thousand
tokens costs nothing until somebody joins it.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import numpy as np

from asyncrl.rollout.env import Env
from asyncrl.rollout.renderer import ParsedTurn
from asyncrl.rollout.tools import Tool
from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript
from asyncrl.types import IntArray, Message, Row, Trajectory, TruncationCause

__all__ = ["CountingRenderer", "Playback", "ScriptedEnv", "blank"]

_BUFFER = np.zeros(65_536, dtype=np.int32)


def blank(count: int) -> IntArray:
    """(count,) tokens."""
    return _BUFFER[:count] if count <= len(_BUFFER) else np.zeros(count, dtype=np.int32)


class Playback:
    """Owns the place of each trajectory in its script. The row of a group is its script."""

    def __init__(self, groups: Sequence[GroupScript]) -> None:
        self._groups = groups
        self._left: dict[str, tuple[int, int]] = {}
        # Trajectory -> its turn, and the tokens of it that were not sampled yet.

    def member(self, trajectory_id: str) -> MemberScript:
        """The script of a trajectory."""
        group, member = map(int, trajectory_id.split("-"))
        return member_of(self._groups[group % len(self._groups)], member)

    def sample(self, trajectory_id: str, most: int) -> tuple[TurnScript | None, int, bool]:
        """The next request of a trajectory, for at most ``most`` tokens: the turn that it begins, else None; its
        tokens; and whether the turn is complete with them.

        Beyond the end of the script there are no tokens.
        """
        script = self.member(trajectory_id)
        turn, left = self._left.get(trajectory_id, (0, -1))
        begins = left < 0
        if turn >= len(script.turns):
            return None, 0, True
        if begins:
            left = script.turns[turn].tokens
        tokens = min(left, most)
        self._left[trajectory_id] = (turn, left - tokens)
        goes_on = tokens < left or (script.truncated and turn == len(script.turns) - 1)
        return script.turns[turn] if begins else None, tokens, not goes_on or not tokens

    def next_turn(self, trajectory_id: str, turn: int) -> None:
        """The trajectory has read the environment's answer and begins ``turn`` (from 0)."""
        self._left[trajectory_id] = (turn, -1)

    def end(self, trajectory_id: str) -> None:
        """The trajectory is over."""
        self._left.pop(trajectory_id, None)


def member_of(group: GroupScript, member: int) -> MemberScript:
    """The script of a group's member; a group may be simulated with more members than it had."""
    return group.members[member % len(group.members)]


class ScriptedEnv(Env):
    """Answers as late and pays as much as the script says. One instance serves all trajectories."""

    def __init__(self, playback: Playback, *, reset_s: float) -> None:
        self._playback = playback
        self._reset_s = reset_s

    async def reset(self, row: Row) -> list[Message]:
        """The prompt, which the members of a group have in common."""
        await anyio.sleep(self._reset_s)
        return [_message(member_of(row, 0).turns[0].new_tokens)]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        """The next turn's new tokens; None after the last turn of a trajectory that ended by itself."""
        script = member_of(traj.row, traj.member)
        if traj.turns < len(script.turns):
            await anyio.sleep(script.turns[traj.turns - 1].reply_s)
            self._playback.next_turn(traj.id, traj.turns)
            return [_message(script.turns[traj.turns].new_tokens)]
        self._playback.next_turn(traj.id, traj.turns)
        return [_message(0)] if script.truncated else None

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """What the script says, after the rest of its time."""
        script = member_of(row, traj.member)
        self._playback.end(traj.id)
        await anyio.sleep(script.turns[-1].reply_s)
        return script.reward

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        """The same."""
        return await self.reward(traj, row)


class CountingRenderer:
    """Messages are numbers of tokens."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """(T,)"""
        return blank(messages[0]["tokens"])

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """(T,)"""
        return blank(new[0]["tokens"])

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """The messages as they are: the script has them as the run shortened them."""
        return list(messages)

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """Nothing was said."""
        return ParsedTurn(message={"role": "assistant", "content": ""}, tool_calls=())


def _message(tokens: int) -> Message:
    return {"role": "user", "content": "", "tokens": tokens}
