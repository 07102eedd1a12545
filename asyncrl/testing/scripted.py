"""Scripted stand-ins for everything slow: sampler, learner, publisher and renderer, for tests on the virtual clock.

Durations and tokens are functions that the test passes in; what happened is kept in public lists. The real engine,
schedule and trainer run on top of them unchanged.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson

from asyncrl.errors import CheckpointError, NonFiniteError, StalenessError
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.publishing.policy import Policy
from asyncrl.rollout.renderer import ParsedTurn
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import ModelRef, Sampler, SegmentRequest
from asyncrl.types import FloatArray, IntArray, Message, Segment, StopReason, VersionSpan

__all__ = [
    "END",
    "ByteRenderer",
    "ScriptedLearner",
    "ScriptedPublisher",
    "ScriptedSampler",
    "chunk_result",
    "heavy_tail",
    "scripted_policy",
]

END = 3
"""The stop token of ``ByteRenderer``."""


def heavy_tail(seed: int, *, median_s: float = 1.0, shape: float = 1.2) -> Callable[[], float]:
    """Pareto-distributed durations: most near the median, some a hundred times longer."""
    source = random.Random(seed)
    scale = median_s / 2 ** (1 / shape)
    return lambda: scale * source.paretovariate(shape)


class ByteRenderer:
    """One token a byte, contents concatenated, a turn ends with ``END``. Calls no tools."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = (END,)

    async def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> IntArray:
        """The bytes of all contents."""
        return _bytes("".join(str(message["content"]) for message in messages))

    async def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn_ids: IntArray, tools: Sequence[Tool]
    ) -> IntArray:
        """The bytes of the new contents, after the missing ``END`` if the turn was cut."""
        text = _bytes("".join(str(message["content"]) for message in new))
        closed = len(turn_ids) > 0 and int(turn_ids[-1]) == END
        return text if closed else np.concatenate([np.array([END], dtype=np.int32), text])

    async def shortened(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """The messages as they are."""
        return list(messages)

    async def parse(self, turn_ids: IntArray, tools: Sequence[Tool] = ()) -> ParsedTurn:
        """The bytes as text."""
        return ParsedTurn(message={"role": "assistant", "content": self.text(turn_ids)}, tool_calls=())

    def text(self, ids: IntArray) -> str:
        """One character for each token but ``END``."""
        said: bytes = ids[ids != END].astype(np.uint8).tobytes()
        return said.decode("latin-1")


def _bytes(text: str) -> IntArray:
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8).astype(np.int32)


class ScriptedSampler:
    """Answers after ``seconds(request)`` with ``tokens(request)``; a turn always ends.

    ``requests`` and ``segments`` are what was asked and served, in order.
    """

    def __init__(
        self,
        *,
        seconds: Callable[[SegmentRequest], float] = lambda request: 0.0,
        tokens: Callable[[SegmentRequest], Sequence[int]] | None = None,
    ) -> None:
        self._seconds = seconds
        self._tokens = tokens or (lambda request: [65 + request.version % 26] * 3 + [END])
        self.requests: list[SegmentRequest] = []
        self.segments: list[Segment] = []
        self.in_flight = 0
        self.peak_in_flight = 0

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """There is nothing to connect to."""
        yield

    async def sample(self, request: SegmentRequest) -> Segment:
        """Serve the script's tokens; each gets the log-probability -1 - id / 1000, so that a mix-up shows."""
        self.requests.append(request)
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await anyio.sleep(self._seconds(request))
        finally:
            self.in_flight -= 1
        tokens = np.array(self._tokens(request)[: request.max_new_tokens], dtype=np.int32)
        ended = len(tokens) > 0 and int(tokens[-1]) == END
        segment = Segment(
            tokens=tokens,
            logprobs=(-1.0 - tokens / 1000).astype(np.float32),
            versions=(VersionSpan(version=request.version, start=0, end=len(tokens)),) if len(tokens) else (),
            stop=StopReason.STOP if ended else StopReason.LENGTH,
            server="scripted",
        )
        self.segments.append(segment)
        return segment


def chunk_result(sequences: Sequence[TrainingSequence], **sums: float) -> ChunkResult:
    """What a learner reports that shares no prefix and computes the sampler's log-probabilities."""
    tokens = sum(int(sequence.mask.sum()) for sequence in sequences)
    input_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return ChunkResult(
        tokens=tokens,
        sums={"loss": 0.0, **sums},
        log_ratios=np.zeros(tokens, dtype=np.float32),
        input_tokens=input_tokens,
        computed_tokens=input_tokens,
    )


class ScriptedLearner:
    """Takes ``train_s`` for each forward-backward pass and ``step_s`` for each optimizer step.

    ``batches`` holds, for each optimizer step, the sequences that were trained by it. ``parameters`` is a digest of
    everything that was trained, in its order, and as with real ones the least difference shows.
    """

    def __init__(self, *, train_s: float = 0.0, step_s: float = 0.0, lora_rank: int | None = 8) -> None:
        self._train_s = train_s
        self._step_s = step_s
        self.lora_rank = lora_rank
        self.model_path = Path("scripted")
        self.version = 0
        self.batches: list[list[TrainingSequence]] = []
        self.divisors: list[float] = []
        self.settings: list[OptimizerSettings] = []
        self.pending: list[TrainingSequence] = []
        self._loaded = ""
        # The parameters before ``batches``.
        self.fail_at: int | None = None
        """Optimizer step (from 1) that finds a gradient that is not finite."""

    async def open(self) -> None:
        """There is nothing to load."""

    async def close(self) -> None:
        """There is nothing to free."""

    async def prepare_step(self, sequences: Sequence[TrainingSequence], loss: Any) -> None:
        """Nothing is computed before a step."""

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        """Remember the sequences."""
        await anyio.sleep(self._train_s)
        self.pending.extend(sequences)
        return chunk_result(sequences)

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Close the batch and make a version."""
        await anyio.sleep(self._step_s)
        if self.fail_at == self.version + 1:
            self.pending.clear()
            raise NonFiniteError("scripted: the gradient norm is nan")
        self.batches.append(list(self.pending))
        self.divisors.append(divisor)
        self.settings.append(settings)
        self.pending.clear()
        self.version += 1
        return {"grad_norm": 1.0, "lr": settings.lr}

    async def discard_gradients(self) -> None:
        """Forget the open batch."""
        self.pending.clear()

    async def end_step(self) -> None:
        """Nothing was computed before the step."""

    @property
    def parameters(self) -> str:
        """Hex digest of everything that was trained."""
        parameters = self._loaded
        for batch, divisor, settings in zip(self.batches, self.divisors, self.settings, strict=True):
            digest = hashlib.sha256(f"{parameters} {divisor!r} {settings!r}".encode())
            for sequence in batch:
                for array in (sequence.tokens, sequence.logprobs, sequence.mask, sequence.ages):
                    digest.update(array.tobytes())
                digest.update(f"{sequence.advantage!r} {sequence.weight!r} {sequence.temperature!r}".encode())
            parameters = digest.hexdigest()
        return parameters

    async def save_state(self, directory: Path) -> None:
        """Write the digest and the version."""
        state = {"version": self.version, "parameters": self.parameters}
        (directory / "scripted.json").write_bytes(orjson.dumps(state))

    async def load_state(self, directory: Path) -> None:
        """Go on from there; ``batches`` are those trained from now on."""
        path = directory / "scripted.json"
        try:
            state = orjson.loads(path.read_bytes())
            self.version, self._loaded = state["version"], state["parameters"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error!r}") from error
        self.batches, self.divisors, self.settings = [], [], []

    async def load_exported(self, directory: Path) -> None:
        """There is nothing to set."""

    async def export(self, directory: Path) -> None:
        """Nothing is written."""

    async def weights(self) -> Mapping[str, Any]:
        """No parameters: an empty mapping."""
        return {}

    async def adapter_config(self) -> Mapping[str, Any]:
        """Kind and rank of the adapter."""
        return {"peft_type": "LORA", "r": self.lora_rank}

    async def logprobs(self, tokens: IntArray, *, start: int, temperature: float) -> FloatArray:
        """(T - start,) zeros."""
        return np.zeros(len(tokens) - start, dtype=np.float32)


class ScriptedPublisher:
    """Publishes after ``seconds``. ``holders`` counts who uses each version; ``published`` lists them in order."""

    def __init__(self, *, seconds: Callable[[], float] = lambda: 0.0, pins_versions: bool = True) -> None:
        self._seconds = seconds
        self.pins_versions = pins_versions
        self.staged: list[int] = []
        self.published: list[int] = []
        self.holders: Counter[int] = Counter()

    async def stage(self, version: int) -> None:
        """Remember the version."""
        self.staged.append(version)

    async def adopt(self, versions: Iterable[int]) -> frozenset[int]:
        """All of ``versions`` if versions can be pinned, else none."""
        adopted = frozenset(versions if self.pins_versions else ())
        self.published.extend(sorted(adopted))
        return adopted

    async def publish(self, version: int) -> float:
        """Take ``seconds()``, then list ``version`` as published; the probe error is 0."""
        await anyio.sleep(self._seconds())
        self.published.append(version)
        return 0.0

    def model_ref(self, version: int, anchor: int | None = None) -> ModelRef:
        """An adapter name for each version; a version that was never published is a fault of the engine."""
        if version not in self.published:
            raise StalenessError(f"version {version} was asked for, but only {self.published} are published")
        return ModelRef(adapter=f"scripted-v{version}", extra_key=f"v{version if anchor is None else anchor}")

    def pin(self, version: int) -> None:
        """Count one more user of ``version``."""
        self.holders[version] += 1

    def unpin(self, version: int) -> None:
        """Count one user of ``version`` less."""
        self.holders[version] -= 1


def scripted_policy(
    *,
    sampler: Sampler | None = None,
    learner: ScriptedLearner | None = None,
    publisher: ScriptedPublisher | None = None,
) -> Policy:
    """A policy of scripted parts; pass your own to script them and to look at them afterwards."""
    return Policy(
        learner or ScriptedLearner(),
        sampler=sampler or ScriptedSampler(),
        publisher=publisher or ScriptedPublisher(),
    )
