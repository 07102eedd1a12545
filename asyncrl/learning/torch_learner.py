"""TorchLearner: parameters and optimizer, in a thread of this process or in processes of their own.

What it computes is in ``torch_model``, where that lives in ``modelhost``; this is its asynchronous face, and importing
it imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncrl.errors import ConfigError, LearnerError, require_choice, require_count
from asyncrl.learning.adapterfolder import read_adapter
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import Loss
from asyncrl.learning.modelfolder import find_model
from asyncrl.learning.modelhost import ModelHost, ModelOptions, ThreadHost
from asyncrl.learning.options import LoraConfig, Sharing
from asyncrl.learning.ranks.client import RanksHost
from asyncrl.learning.ranks.launch import LocalRanks, RemoteRanks, split_address
from asyncrl.types import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

__all__ = ["DType", "TorchLearner", "WorkerKind"]

WorkerKind: TypeAlias = Literal["thread", "process"]
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
    ``micro_batch_tokens``: tokens of one forward pass, those that sequences share counted once; bounds memory, does not
    change the gradient. None: 512 on a CPU, which larger passes do not make faster, and 4096 elsewhere.
    ``sharing``: "auto" computes once what sequences begin with in common, if a test at the start finds the model's
    numbers unchanged; "off" computes each sequence by itself.
    ``gradient_checkpointing``: compute activations twice to hold fewer.
    ``seed``: of the adapter's first values.
    ``worker``: "thread" computes in a thread of this process, "process" in a process of its own, whose work the event
    loop does not feel and whose crash is an error of the step.
    ``ranks``: processes that train together on this machine, each with a part of the parameters; more than 1 are never
    threads. With GPUs each rank has one.
    ``address``: "host:port" of the first of the ranks that somebody has started elsewhere, in place of ``ranks``.
    ``token_file``: file with a secret that those ranks know too.
    ``rank_timeout_s``: how long ranks of ours wait for one that does not go on.
    ``log``: file for what ranks of ours print; None: it is seen only in errors.
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
        micro_batch_tokens: int | None = None,
        sharing: Sharing = "auto",
        gradient_checkpointing: bool = False,
        seed: int = 0,
        worker: WorkerKind = "thread",
        ranks: int = 1,
        address: str | None = None,
        token_file: str | Path | None = None,
        rank_timeout_s: float = 600.0,
        log: Path | None = None,
    ) -> None:
        self._path = find_model(model)
        require_choice("model.dtype", dtype, DType)
        require_choice("model.sharing", sharing, Sharing)
        if micro_batch_tokens is not None:
            require_count("model.micro_batch_tokens", micro_batch_tokens, least=1)
        if threads is not None:
            require_count("model.threads", threads, least=1)
        self.adapter = None if adapter is None else Path(adapter).expanduser()
        self.lora = lora if self.adapter is None else read_adapter(self.adapter, lora)
        self.dtype = dtype
        self.device = device
        self.threads = threads
        self.micro_batch_tokens = micro_batch_tokens
        self.sharing: Sharing = sharing
        self.gradient_checkpointing = gradient_checkpointing
        self.seed = seed
        self.worker: WorkerKind = worker
        self.ranks = ranks
        self.address = address
        self.token_file = None if token_file is None else Path(token_file).expanduser()
        self.rank_timeout_s = rank_timeout_s
        self.log = log
        self._check_ranks()
        self._host: ModelHost | None = None
        self._adapter_config: Mapping[str, Any] = {}

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
        host = self._host = self._new_host()
        await host.open()
        if self.lora is not None:
            self._adapter_config = await host.call("adapter_config")

    async def close(self) -> None:
        """Free the model, and end its thread after the last call, or its processes."""
        host, self._host = self._host, None
        if host is not None:
            await host.close()

    async def prepare_step(self, sequences: Sequence[TrainingSequence], loss: Loss) -> None:
        """Keep what ``loss`` needs to know of these sequences under the parameters as they are now."""
        await self._opened.call("prepare_step", sequences=sequences, loss=loss)

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, *, updates: int = 0
    ) -> ChunkResult:
        """Add the gradient of ``sum(weight * per-token loss)``; returns sums over the trained tokens."""
        arguments = {"sequences": sequences, "loss": loss, "updates": updates}
        result: ChunkResult = await self._opened.call("forward_backward", **arguments)
        return result

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Divide the gradient by ``divisor``, clip, step, clear; ``NonFiniteError`` if its norm is not finite."""
        result: Mapping[str, float] = await self._opened.call("optimizer_step", settings=settings, divisor=divisor)
        return result

    async def discard_gradients(self) -> None:
        """Forget what ``forward_backward`` accumulated."""
        await self._opened.call("discard_gradients")

    async def end_step(self) -> None:
        """Forget what ``prepare_step`` kept."""
        await self._opened.call("end_step")

    async def save_state(self, directory: Path) -> None:
        """Write trained parameters and Adam's moments into the empty ``directory``."""
        await self._opened.call("save_state", directory=directory)

    async def load_state(self, directory: Path) -> None:
        """Set what ``save_state`` wrote; ``CheckpointError`` if it is damaged or of another model."""
        await self._opened.call("load_state", directory=directory)

    async def load_exported(self, directory: Path) -> None:
        """Set the parameters that ``export`` wrote; ``CheckpointError`` if they are of another model or adapter."""
        await self._opened.call("load_exported", directory=directory)

    async def export(self, directory: Path) -> None:
        """Write an adapter folder, or the whole model with its tokenizer, into the empty ``directory``."""
        await self._opened.call("export", directory=directory)

    async def weights(self) -> Mapping[str, torch.Tensor]:
        """Copies of the current parameters on the device, by their names in exported files."""
        result: Mapping[str, torch.Tensor] = await self._opened.call("weights")
        return result

    async def adapter_config(self) -> Mapping[str, Any]:
        """The content of ``adapter_config.json``; it never changes, so nothing that the worker does is waited for."""
        return self._adapter_config if self._opened else {}

    async def logprobs(self, tokens: IntArray, *, start: int, temperature: float) -> FloatArray:
        """(T - start,) log-probabilities of ``tokens[start:]``, logits / ``temperature``."""
        result: FloatArray = await self._opened.call("logprobs", tokens=tokens, start=start, temperature=temperature)
        return result

    def _check_ranks(self) -> None:
        require_choice("model.worker", self.worker, WorkerKind)
        require_count("model.ranks", self.ranks, least=1)
        if not self.rank_timeout_s > 0:
            raise ConfigError.for_value("model.rank_timeout_s", self.rank_timeout_s, "more than 0")
        if self.address is not None:
            split_address(self.address)
            if self.ranks > 1:
                allowed = "left out beside model.address: whoever starts the ranks there says how many"
                raise ConfigError.for_value("model.ranks", self.ranks, allowed)
        if (self.address is None) != (self.token_file is None):
            raise ConfigError("model.address and model.token_file belong together: set both, or none of them")

    def _new_host(self) -> ModelHost:
        options = ModelOptions(path=self._path.absolute(), adapter=self.adapter, options=self._model_options())
        if self.address is not None and self.token_file is not None:
            return RanksHost(options, RemoteRanks(address=self.address, token_file=self.token_file))
        if self.worker == "thread" and self.ranks == 1:
            return ThreadHost(options)
        ranks = LocalRanks(ranks=self.ranks, timeout_s=self.rank_timeout_s, threads=self.threads, log=self.log)
        return RanksHost(options, ranks)

    def _model_options(self) -> Mapping[str, Any]:
        """Keywords of ``TorchModel``."""
        return {
            "lora": self.lora,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "micro_batch_tokens": self.micro_batch_tokens,
            "sharing": self.sharing,
            "gradient_checkpointing": self.gradient_checkpointing,
            "seed": self.seed,
        }

    @property
    def _opened(self) -> ModelHost:
        if self._host is None:
            raise LearnerError("the learner is not open")
        return self._host
