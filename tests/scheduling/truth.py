"""Scripted parts that know the truth by themselves.

Every sampled token says which version was live when its request was dispatched, and of which member it is. The learner
reads that back from what it is given to train, so no version that the package recorded is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel

import asyncrl as rl
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.rollout.renderer import ParsedTurn
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedLearner, ScriptedPublisher, ScriptedSampler
from asyncrl.testing.scripted import chunk_result
from asyncrl.types import IntArray, Segment

__all__ = ["Dispatch", "NumberRenderer", "Trained", "TrueLearner", "TruePublisher", "TrueSampler", "spelled"]

_BYTES, _LARGEST = 256, 64
# A sampled token is _BYTES + (group * _LARGEST + member) * _LARGEST + version; what is below _BYTES is text.


def spelled(tokens: IntArray) -> tuple[set[int], set[tuple[int, int]]]:
    """What sampled tokens say: their versions, and of which (group, member) they are."""
    numbers = [int(token) - _BYTES for token in tokens if token != END]
    owners = {divmod(number // _LARGEST, _LARGEST) for number in numbers}
    return {number % _LARGEST for number in numbers}, owners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dispatch:
    """A request as it left, and what was true then."""

    time: float
    group: int
    member: int
    version: int
    """The version that it had to be sampled with."""
    kv_age: int
    """``version`` minus the one that computed the prefix which this request could reuse."""
    request: SegmentRequest


class NumberRenderer(ByteRenderer):
    """Does not try to read the sampled numbers as text."""

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        return ParsedTurn(message={"role": "assistant", "content": ""}, tool_calls=())


class TruePublisher(ScriptedPublisher):
    """``live`` is the newest version that was acknowledged; nobody may give up what he does not hold."""

    live = -1

    async def stage(self, version: int) -> None:
        await anyio.lowlevel.checkpoint()
        await super().stage(version)

    async def publish(self, version: int) -> float:
        difference = await super().publish(version)
        self.live = version
        return difference

    def unpin(self, version: int) -> None:
        assert self.holders[version] > 0, f"version {version} is unpinned by nobody who has pinned it"
        super().unpin(version)


class TrueSampler(ScriptedSampler):
    """Samples three tokens a segment that say which version had to be used by ``kv_cache``; None pins trajectories.

    A turn takes ``parts`` segments.
    """

    def __init__(
        self,
        publisher: TruePublisher,
        *,
        kv_cache: rl.KVCache | None,
        seconds: Callable[[SegmentRequest], float],
        parts: int = 1,
    ) -> None:
        super().__init__(seconds=seconds, tokens=self._spell)
        self.dispatches: list[Dispatch] = []
        self._publisher = publisher
        self._kv_cache = kv_cache
        self._parts = parts
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._prefixes: dict[tuple[str, str], int] = {}
        # Trajectory and cache namespace -> the version that filled it.
        self._asked: Counter[str] = Counter()
        self._scripts: dict[SegmentRequest, list[int]] = {}

    async def sample(self, request: SegmentRequest) -> Segment:
        name = request.trajectory_id
        group, member = (int(part) for part in name.split("-"))
        version = self._version(name)
        self.dispatches.append(
            Dispatch(
                time=anyio.current_time(),
                group=group,
                member=member,
                version=version,
                kv_age=version - self._prefixes.setdefault((name, request.extra_key), version),
                request=request,
            )
        )
        assert self._publisher.holders[request.version] > 0, f"version {request.version} is used but not held"
        self._asked[name] += 1
        ending = [] if self._asked[name] % self._parts else [END]
        self._scripts[request] = [_BYTES + (group * _LARGEST + member) * _LARGEST + version] * 3 + ending
        return await super().sample(request)

    def _version(self, name: str) -> int:
        live = self._publisher.live
        first = self._first.setdefault(name, live)
        if self._kv_cache is None:
            return first
        if self._kv_cache.on_limit == "refill" or live - first <= self._kv_cache.max_staleness:
            self._last[name] = live
        return self._last[name]

    def _spell(self, request: SegmentRequest) -> list[int]:
        return self._scripts[request]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One member in a forward-backward pass at the learner's ``version``; ``sampled`` is what its tokens say."""

    version: int
    group: int
    member: int
    sampled: frozenset[int]

    @property
    def ages(self) -> list[int]:
        """Of each version among its trained tokens."""
        return [self.version - sampled for sampled in self.sampled]


class TrueLearner(ScriptedLearner):
    """Remembers what it trained, by its own count of versions.

    As in a worker, the gradient is there as soon as a pass began, whether anybody still waits for it or not.
    """

    def __init__(self, *, train_s: float = 0.0, step_s: float = 0.0) -> None:
        super().__init__(train_s=train_s, step_s=step_s)
        self.trained: list[Trained] = []

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        self.pending.extend(sequences)
        for sequence in sequences:
            sampled, owners = spelled(sequence.tokens[sequence.mask])
            [(group, member)] = owners
            self.trained.append(Trained(version=self.version, group=group, member=member, sampled=frozenset(sampled)))
        await anyio.sleep(self._train_s)
        return chunk_result(sequences)

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        assert self.pending
        return await super().optimizer_step(settings, divisor=divisor)
