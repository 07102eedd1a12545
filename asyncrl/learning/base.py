"""The seam between the trainer and whatever holds the parameters. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from asyncrl.errors import ConfigError
from asyncrl.types import FloatArray, IntArray

__all__ = [
    "ChunkResult",
    "Learner",
    "OptimizerSettings",
    "TrainingSequence",
    "Update",
    "distinct_sequences",
    "model_vocab_size",
]


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One trajectory as the learner sees it; position i is about token i given the tokens before it.

    Not to be changed, but quick to make.
    """

    tokens: IntArray
    """(T,)"""
    logprobs: FloatArray
    """(T,) the sampler's log-probabilities; 0 where ``mask`` is False, and never read there."""
    mask: npt.NDArray[np.bool_]
    """(T,) True for tokens that are trained. ``mask[0]`` is False: the first token has no condition."""
    ages: IntArray
    """(T,) int32, the version at the step's start minus the version that sampled the token; 0 where ``mask`` is
    False."""
    advantage: float
    weight: float
    """Factor of each trained token before the global divisor (``normalize``): 1, 1/tokens of the trajectory, .."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    """Sums over the trained tokens of one forward-backward pass."""

    tokens: int
    """Trained tokens."""
    sums: Mapping[str, float]
    """Name -> sum over trained tokens: ``loss`` (weighted), ``ratio``, ``kl``, ``clipped``, ``entropy``, ..
    The trainer divides ``loss`` by the step's divisor and the others by the step's trained tokens."""
    log_ratios: FloatArray
    """(``tokens``,) float32, log-probability of the learner minus that of the sampler for each trained token, sequence
    after sequence. Empty if the learner does not say."""
    input_tokens: int
    """Tokens of the sequences, prompts included."""
    computed_tokens: int
    """Tokens that went through the model: fewer if sequences share a prefix that is computed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Adam's numbers for one step (the schedule is already applied to ``lr``)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """One optimizer step of a trainer step, and what it is made from."""

    chunks: Sequence[Sequence[TrainingSequence]]
    """The forward-backward passes. Updates of one step share sequences: in each epoch they are the same objects."""
    divisor: float = 1.0
    settings: OptimizerSettings | None = None
    """None if the step was not taken."""


def distinct_sequences(updates: Iterable[Update]) -> list[TrainingSequence]:
    """Every sequence of ``updates`` once, in the order of their first use: what a step is prepared with."""
    sequences = (sequence for update in updates for chunk in update.chunks for sequence in chunk)
    return list({id(sequence): sequence for sequence in sequences}.values())


class Learner(Protocol):
    """What holds parameters and takes steps. Real: ``TorchLearner``. Fake: ``asyncrl.testing.ScriptedLearner``.

    Methods are called by one trainer, one at a time. None of them blocks the event loop.
    """

    @property
    def model_path(self) -> Path:
        """Folder with the base model and its tokenizer, as the sampling servers load it."""
        ...

    @property
    def lora_rank(self) -> int | None:
        """Rank of the trained adapter, or None if all weights are trained."""
        ...

    async def open(self) -> None:
        """Load the model. Called once, before anything else."""
        ...

    async def close(self) -> None:
        """Free the model and end the worker."""
        ...

    async def prepare_step(self, sequences: Sequence[TrainingSequence], loss: Any) -> None:
        """Compute what ``loss`` needs to know of these sequences and keep it until ``end_step``.

        Called with all sequences of a step before its first update; with chunks, before the pass of each.
        """
        ...

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        """Add the gradient of ``sum(weight * per-token loss)`` over these sequences.

        ``updates``: optimizer steps since the trainer step began, which the loss may want to know.
        """
        ...

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Divide the gradient by ``divisor``, clip, step, clear. Returns ``grad_norm``, ``lr``.

        Raises ``NonFiniteError`` before any parameter changes if the gradient norm is not finite.
        """
        ...

    async def discard_gradients(self) -> None:
        """Forget what ``forward_backward`` accumulated."""
        ...

    async def end_step(self) -> None:
        """Forget what ``prepare_step`` kept: the trainer step is over, or will not happen."""
        ...

    async def save_state(self, directory: Path) -> None:
        """Write trained parameters and the optimizer's state into the empty ``directory``. Nothing is pickled."""
        ...

    async def load_state(self, directory: Path) -> None:
        """Set what ``save_state`` wrote: the steps that follow give the same bits as they did there.

        Raises ``CheckpointError`` if it is of another model.
        """
        ...

    async def load_exported(self, directory: Path) -> None:
        """Set the parameters that ``export`` wrote. Raises ``CheckpointError`` if they are of another model."""
        ...

    async def export(self, directory: Path) -> None:
        """Write what the servers need for the current parameters into the empty ``directory``.

        LoRA: a PEFT adapter folder (plain scaling). Full: a model folder that SGLang's update from disk reads.
        """
        ...

    async def weights(self) -> Mapping[str, Any]:
        """A copy of the current parameters, which no later step changes: tensors on the learner's device.

        The names are those of the files that ``export`` writes. LoRA: the adapter's alone.
        """
        ...

    async def adapter_config(self) -> Mapping[str, Any]:
        """What ``adapter_config.json`` says about the adapter. Called only if ``lora_rank`` is not None."""
        ...

    async def logprobs(self, tokens: IntArray, *, start: int, temperature: float) -> FloatArray:
        """(T - start,) log-probabilities of ``tokens[start:]`` under the current parameters, logits / temperature."""
        ...


def model_vocab_size(model_path: Path) -> int:
    """The number of token ids of the model in a folder, from its ``config.json``."""
    path = model_path / "config.json"
    try:
        size = orjson.loads(path.read_bytes())["vocab_size"]
    except (OSError, orjson.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{path} does not say vocab_size, which a probe needs: {error!r}") from error
    return int(size)
