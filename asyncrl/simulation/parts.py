"""The simulated policy: a sampler, a learner and a publisher that only take time."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np

from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.sampling.base import SegmentRequest
from asyncrl.simulation.cost import Cost, Deck, LoadModel
from asyncrl.simulation.playback import Playback, blank
from asyncrl.simulation.sharing import ProcessorSharing
from asyncrl.simulation.workload import TurnScript, Workload
from asyncrl.testing.scripted import ScriptedLearner, ScriptedPublisher
from asyncrl.types import FloatArray, Segment, StopReason, VersionSpan

__all__ = ["SimulatedLearner", "SimulatedPublisher", "SimulatedSampler"]

_LOGPROBS = np.full(65_536, -1.0, dtype=np.float32)


class SimulatedSampler:
    """Samples what the scripts say, in the time that the load model says."""

    def __init__(self, playback: Playback, load: LoadModel, *, source: random.Random) -> None:
        self.station = ProcessorSharing()
        self._playback = playback
        self._load = load
        self._ratios = Deck(load.ratios, source)
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
        self._training = _Work(workload.training, station, Deck(workload.training.ratios, source, lead=lead))
        self._optimizer = _Work(workload.optimizer, station, Deck(workload.optimizer.ratios, source, lead=lead))

    async def forward_backward(self, sequences: Sequence[TrainingSequence], loss: Any) -> ChunkResult:
        """By the number of sequences and trained tokens."""
        tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
        await self._training.do(1, len(sequences), tokens)
        return ChunkResult(tokens=tokens, sums={"loss": 0.0})

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """One more version."""
        await self._optimizer.do(1)
        return {"grad_norm": 1.0, "lr": settings.lr}


class SimulatedPublisher(ScriptedPublisher):
    """The same for staging and publishing. The first version is there at once."""

    def __init__(
        self, workload: Workload, station: ProcessorSharing, source: random.Random, *, pins_versions: bool, lead: int
    ) -> None:
        super().__init__(pins_versions=pins_versions)
        self._staging = _Work(workload.staging, station, Deck(workload.staging.ratios, source, lead=lead))
        self._publication = workload.publication
        self._ratios = Deck(workload.publication.ratios, source, lead=lead)
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


class _Work:
    """One kind of the trainer's work."""

    def __init__(self, cost: Cost, station: ProcessorSharing, ratios: Deck) -> None:
        self._cost = cost
        self._station = station
        self._ratios = ratios

    async def do(self, *sizes: float) -> None:
        """Take the time of work of these sizes."""
        await self._station.work(self._cost.seconds(*sizes) * self._ratios.draw(), speed=self._cost.speed)


def _logprobs(count: int) -> FloatArray:
    return _LOGPROBS[:count] if count <= len(_LOGPROBS) else np.full(count, -1.0, dtype=np.float32)
