"""The simulated policy, environment and renderer: they play scripts back, and only take time.

Tokens have no content here, only numbers. All arrays are views of one buffer, so that a context of a hundred thousand
tokens costs nothing until somebody joins it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import numpy as np

from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.rollout.env import Env
from asyncrl.rollout.renderer import ParsedTurn
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.simulation.cost import Cost, LoadModel, ShuffledRatios
from asyncrl.simulation.sharing import ProcessorSharing
from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript, Workload
from asyncrl.testing.scripted import ByteRenderer, ScriptedLearner, ScriptedPublisher, chunk_result
from asyncrl.types import (
    FloatArray,
    IntArray,
    Message,
    Row,
    Segment,
    StopReason,
    Trajectory,
    TruncationCause,
    VersionSpan,
)

__all__ = [
    "CountingRenderer",
    "Playback",
    "ScriptedEnv",
    "SimulatedLearner",
    "SimulatedPublisher",
    "SimulatedSampler",
    "blank",
    "member_of",
]

_BUFFER = np.zeros(65_536, dtype=np.int32)
_LOGPROBS = np.full(65_536, -1.0, dtype=np.float32)


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
        """The reward, and the time until it."""
        return await self.reward(traj, row)


class CountingRenderer(ByteRenderer):
    """Messages are numbers of tokens."""

    stop_token_ids: tuple[int, ...] = ()

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """(T,) as many tokens as the message says."""
        return blank(messages[0]["tokens"])

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """(T,) as many tokens as the message says."""
        return blank(new[0]["tokens"])

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """An empty message: tokens have no content here."""
        return ParsedTurn(message={"role": "assistant", "content": ""}, tool_calls=())


def _message(tokens: int) -> Message:
    return {"role": "user", "content": "", "tokens": tokens}


class SimulatedSampler:
    """Samples what the scripts say, in the time that the load model says."""

    def __init__(self, playback: Playback, load: LoadModel, *, source: random.Random) -> None:
        self.station = ProcessorSharing()
        self._playback = playback
        self._load = load
        self._ratios = ShuffledRatios(load.ratios, source)
        self._namespaces: dict[str, str] = {}
        # Trajectory -> the cache namespace of its last request.

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """There is nothing to connect to."""
        yield

    async def sample(self, request: SegmentRequest) -> Segment:
        """Serve the next tokens of the trajectory's script; beyond its end an empty segment, at once."""
        turn, tokens, ends = self._playback.sample(request.trajectory_id, request.max_new_tokens)
        if tokens:
            own, shared = self._load.parts(1, tokens, self._uncached(request, turn))
            ratio = self._ratios.draw()
            with self.station.request():
                # No sleep of nothing: it would be a turn of the loop for each of many thousand requests.
                if own:
                    await anyio.sleep(ratio * own)
                if shared:
                    await self.station.serve(ratio * shared)
        return Segment(
            tokens=blank(tokens),
            logprobs=_logprobs(tokens),
            versions=(VersionSpan(version=request.version, start=0, end=tokens),) if tokens else (),
            stop=StopReason.STOP if ends else StopReason.LENGTH,
        )

    def _uncached(self, request: SegmentRequest, turn: TurnScript | None) -> int:
        """Context tokens to compute: all of them if the trajectory has moved to a namespace without its prefix."""
        before = self._namespaces.get(request.trajectory_id, request.extra_key)
        self._namespaces[request.trajectory_id] = request.extra_key
        if before != request.extra_key:
            return len(request.input_ids)
        return 0 if turn is None else turn.uncached_tokens


class SimulatedLearner(ScriptedLearner):
    """Takes the time of the workload's costs, the expected one in the ``lead`` first steps, and keeps nothing."""

    def __init__(
        self, workload: Workload, station: ProcessorSharing, source: random.Random, *, lora_rank: int | None, lead: int
    ) -> None:
        super().__init__(lora_rank=lora_rank)
        self._training = _TrainerWork(workload.training, station, source, lead)
        self._optimizer = _TrainerWork(workload.optimizer, station, source, lead)

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        """By the number of sequences and trained tokens."""
        result = chunk_result(sequences)
        await self._training.do(1, len(sequences), result.tokens)
        return replace(result, log_ratios=np.zeros(0, dtype=np.float32))

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Take the time of an optimizer step."""
        await self._optimizer.do(1)
        return {"grad_norm": 1.0, "lr": settings.lr}


class SimulatedPublisher(ScriptedPublisher):
    """Takes the time of staging and publishing. The first version is there at once."""

    def __init__(
        self, workload: Workload, station: ProcessorSharing, source: random.Random, *, pins_versions: bool, lead: int
    ) -> None:
        super().__init__(pins_versions=pins_versions)
        self._staging = _TrainerWork(workload.staging, station, source, lead)
        self._publication = workload.publication
        self._ratios = ShuffledRatios(workload.publication.ratios, source, lead=lead)
        self._station = station

    async def stage(self, version: int) -> None:
        """The trainer waits for this."""
        if version:
            await self._staging.do(1)

    async def publish(self, version: int) -> float:
        """Wait for what the servers have in flight, then be live."""
        if version:
            own, shared = self._publication.parts(1)
            ratio = self._ratios.draw()
            await anyio.sleep(ratio * own)
            await self._station.serve(ratio * shared)
        return await super().publish(version)


class _TrainerWork:
    """One kind of the trainer's work."""

    def __init__(self, cost: Cost, station: ProcessorSharing, source: random.Random, lead: int) -> None:
        self._cost = cost
        self._station = station
        self._ratios = ShuffledRatios(cost.ratios, source, lead=lead)

    async def do(self, *sizes: float) -> None:
        """Take the time of work of these sizes."""
        await self._station.work(self._cost.seconds(*sizes) * self._ratios.draw(), speed=self._cost.speed)


def _logprobs(count: int) -> FloatArray:
    return _LOGPROBS[:count] if count <= len(_LOGPROBS) else np.full(count, -1.0, dtype=np.float32)
