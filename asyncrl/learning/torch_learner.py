"""TorchLearner: parameters and optimizer in this process, in a thread of their own.

What it computes is in ``torch_model``; this is its asynchronous face, and importing it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncrl.concurrency.worker import Worker
from asyncrl.errors import LearnerError, require_choice, require_count
from asyncrl.learning.adapterfolder import read_adapter
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import Loss
from asyncrl.learning.modelfolder import find_model
from asyncrl.learning.options import LoraConfig
from asyncrl.types import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

    from asyncrl.learning.torch_model import TorchModel

__all__ = ["DType", "TorchLearner"]

DType: TypeAlias = Literal["float32", "bfloat16"]


class TorchLearner:
    """Trains the transformers model ``model``, a LoRA adapter of it or all weights.

    ``model``: a folder, or a name of the Hugging Face hub that is in the local cache (see ``find_model``).
    ``lora``: the low-rank adapter that is trained, while the model's own weights stay as they are; None trains all
    weights.
    ``adapter``: folder of the LoRA adapter to start from, in PEFT's format. ``lora`` may be left out then.
    ``dtype``: of parameters and compute; on a CPU bfloat16 is several times slower than float32. The
    optimizer works in float32 with either.
    ``device``: what computes, as torch calls it, such as "cuda:1"; "auto" is the GPU if there is one, else the CPU.
    ``threads``: threads of torch on the CPU; None leaves torch's choice, which is too many if a sampler shares the
    machine.
    ``micro_batch_tokens``: tokens of one forward pass, padding included; bounds memory, does not change the gradient.
    ``gradient_checkpointing``: compute activations twice to hold fewer.
    ``seed``: of the adapter's first values.
    """

    def __init__(  # noqa: PLR0913  the options of a learner; each is one sentence above
        self,
        model: str | Path,
        *,
        lora: LoraConfig | None = None,
        adapter: str | Path | None = None,
        dtype: DType = "float32",
        device: str = "auto",
        threads: int | None = None,
        micro_batch_tokens: int = 4096,
        gradient_checkpointing: bool = False,
        seed: int = 0,
    ) -> None:
        self._path = find_model(model)
        require_choice("model.dtype", dtype, DType)
        require_count("model.micro_batch_tokens", micro_batch_tokens, least=1)
        if threads is not None:
            require_count("model.threads", threads, least=1)
        self.adapter = None if adapter is None else Path(adapter).expanduser()
        self.lora = lora if self.adapter is None else read_adapter(self.adapter, lora)
        self.dtype = dtype
        self.device = device
        self.threads = threads
        self.micro_batch_tokens = micro_batch_tokens
        self.gradient_checkpointing = gradient_checkpointing
        self.seed = seed
        self._worker = Worker("asyncrl-learner")
        self._model: TorchModel | None = None

    @property
    def model_path(self) -> Path:
        """Folder of the base model and its tokenizer."""
        return self._path

    @property
    def lora_rank(self) -> int | None:
        """Rank of the adapter, None if all weights are trained."""
        return None if self.lora is None else self.lora.r

    async def open(self) -> None:
        """Load the model; importing torch and transformers takes up to tens of seconds on a small machine."""
        # A new one: that of an earlier run has ended with it.
        self._worker = Worker("asyncrl-learner")
        self._model = await self._worker.run(self._load)

    async def close(self) -> None:
        """Free the model and end the thread after its last call."""
        self._model = None
        self._worker.close()

    async def prepare_step(self, sequences: Sequence[TrainingSequence], loss: Loss) -> None:
        """Keep what ``loss`` needs to know of these sequences under the parameters as they are now."""
        await self._worker.run(self._opened.prepare_step, sequences, loss)

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, *, updates: int = 0
    ) -> ChunkResult:
        """Add the gradient of ``sum(weight * per-token loss)``; returns sums over the trained tokens."""
        return await self._worker.run(self._opened.forward_backward, sequences, loss, updates)

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Divide the gradient by ``divisor``, clip, step, clear; ``NonFiniteError`` if its norm is not finite."""
        return await self._worker.run(self._opened.optimizer_step, settings, divisor)

    async def discard_gradients(self) -> None:
        """Forget what ``forward_backward`` accumulated."""
        await self._worker.run(self._opened.discard_gradients)

    async def end_step(self) -> None:
        """Forget what ``prepare_step`` kept."""
        await self._worker.run(self._opened.end_step)

    async def save_state(self, directory: Path) -> None:
        """Write trained parameters and Adam's moments into the empty ``directory``."""
        await self._worker.run(self._opened.save_state, directory)

    async def load_state(self, directory: Path) -> None:
        """Set what ``save_state`` wrote; ``CheckpointError`` if it is damaged or of another model."""
        await self._worker.run(self._opened.load_state, directory)

    async def load_exported(self, directory: Path) -> None:
        """Set the parameters that ``export`` wrote; ``CheckpointError`` if they are of another model or adapter."""
        await self._worker.run(self._opened.load_exported, directory)

    async def export(self, directory: Path) -> None:
        """Write an adapter folder, or the whole model with its tokenizer, into the empty ``directory``."""
        await self._worker.run(self._opened.export, directory)

    async def weights(self) -> Mapping[str, torch.Tensor]:
        """Copies of the current parameters on the device, by their names in exported files."""
        return await self._worker.run(self._opened.weights)

    async def adapter_config(self) -> Mapping[str, Any]:
        """The content of ``adapter_config.json``; it never changes, so nothing that the worker does is waited for."""
        return self._opened.adapter_config()

    async def logprobs(self, tokens: IntArray, *, start: int, temperature: float) -> FloatArray:
        """(T - start,) log-probabilities of ``tokens[start:]``, logits / ``temperature``."""
        return await self._worker.run(self._opened.logprobs, tokens, start, temperature)

    def _load(self) -> TorchModel:
        from asyncrl.learning.torch_model import TorchModel

        model = TorchModel(
            self._path,
            lora=self.lora,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            micro_batch_tokens=self.micro_batch_tokens,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.seed,
        )
        if self.adapter is not None:
            model.load_exported(self.adapter)
        return model

    @property
    def _opened(self) -> TorchModel:
        if self._model is None:
            raise LearnerError("the learner is not open")
        return self._model
