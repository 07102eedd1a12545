"""The learner's compute: forward, backward, step and export of one transformers model. Blocking; runs in the worker."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.errors import CheckpointError
from asyncrl.learning.adapterfolder import copy_tokenizer
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import Loss, LossInputs
from asyncrl.learning.masters import MasterAdam
from asyncrl.learning.modelexport import adapter_config, adapter_tensors, file_tensors, model_tensors, write_adapter
from asyncrl.learning.modelloading import checkpoint_layers, load_causal, torch_device, with_adapter
from asyncrl.learning.options import LoraConfig, Sharing
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.prefixtrees import Pass
from asyncrl.learning.sharing import reason_not_to_share
from asyncrl.learning.tokendata import PolicyScoring, StepData
from asyncrl.learning.torch_peers import Alone, Peers, set_whole
from asyncrl.learning.torch_state import load_tensors
from asyncrl.types import FloatArray, IntArray

__all__ = ["TorchModel"]

_USUAL_TOKENS = {"cpu": 512}
"""On a CPU the time of a step hardly depends on how large its passes are, from 500 tokens up, but the memory does."""
_USUAL_TOKENS_ELSE = 4096

_log = logging.getLogger(__name__)


class TorchModel:
    """Owns parameters, gradients and the optimizer's state; see ``TorchLearner`` for the options."""

    def __init__(  # noqa: PLR0913  the options of a learner; TorchLearner says what each is
        self,
        path: Path,
        *,
        lora: LoraConfig | None,
        dtype: str,
        device: str,
        threads: int | None,
        micro_batch_tokens: int | None = None,
        gradient_checkpointing: bool,
        seed: int,
        sharing: Sharing = "auto",
        peers: Peers | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._path = path
        self._peers: Peers = peers or Alone()
        self._causal = load_causal(path, dtype=dtype, device=self._peers.load_device(device))
        max_tokens = micro_batch_tokens or _USUAL_TOKENS.get(torch_device(device).type, _USUAL_TOKENS_ELSE)
        self._micro_batch_tokens = max_tokens
        self._lora: Any = None if lora is None else with_adapter(self._causal, lora)
        if gradient_checkpointing:
            checkpoint_layers(self._causal)
        self._policy = PolicyModule(self._causal)
        if sharing == "off":
            self._policy.unshared = "model.sharing is off"
        elif reason := reason_not_to_share(self._policy):
            self._policy.unshared = reason
            _log.warning("sequences share no prefixes: this model %s", reason)
        self._peers.shard(self._policy, name=device)
        trained = {name: one for name, one in self._causal.named_parameters() if one.requires_grad}
        self._optimizer = MasterAdam(trained)
        self._scoring = PolicyScoring(
            self._policy, path, adapted=self._lora, max_tokens=max_tokens, peers=self._peers, device=device
        )
        self._data = StepData(self._scoring)

    def prepare_step(self, sequences: Sequence[TrainingSequence], loss: Loss) -> None:
        """Keep what ``loss`` needs to know of these sequences under the parameters as they are now."""
        self._data.prepare(sequences, loss)

    def forward_backward(self, sequences: Sequence[TrainingSequence], loss: Loss, updates: int = 0) -> ChunkResult:
        """Add the gradient of ``sum(weight * per-token loss)``; returns sums over the trained tokens."""
        sums: defaultdict[str, float] = defaultdict(float)
        tokens_B = [int(sequence.mask.sum()) for sequence in sequences]
        log_ratios = [np.zeros(tokens, dtype=np.float32) for tokens in tokens_B]
        for one, counts in self._peers.shares(self._policy, sequences, self._micro_batch_tokens):
            batch = [sequences[index] for index in one.sequences]
            logprobs, entropy = self._policy(one)
            inputs = LossInputs(
                logprobs=logprobs,
                sampled_logprobs=self._trained([sequence.logprobs for sequence in batch], batch),
                advantages=self._repeated([sequence.advantage for sequence in batch], one),
                ages=self._trained([sequence.ages for sequence in batch], batch),
                tokens_B=one.tokens_B,
                updates=updates,
                data=self._data.of(batch, loss, logprobs.device),
            )
            output = loss.per_token(inputs)
            output.require_one_each(len(logprobs))
            weighted = counts * (output.loss * self._repeated([sequence.weight for sequence in batch], one)).sum()
            weighted.backward()
            sums["computed_tokens"] += one.computed_tokens
            for name, values in {"loss": weighted.detach(), "entropy": entropy, **output.diagnostics}.items():
                # Not times 0: a ratio may be infinite.
                sums[name] += float(values.sum()) if counts else 0.0
            if not counts:
                continue
            ratios = (logprobs.detach() - inputs.sampled_logprobs).cpu().numpy()
            for index, part in zip(one.sequences, np.split(ratios, np.cumsum(one.tokens_B)[:-1]), strict=True):
                log_ratios[index] += part
        # Every rank has a pass if any has, and so the same names.
        totals = self._peers.summed(torch.tensor(list(sums.values()), dtype=torch.float64)).tolist()
        all_sums = dict(zip(sums, totals, strict=True))
        computed = int(all_sums.pop("computed_tokens", 0))
        joined = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *log_ratios]))
        return ChunkResult(
            tokens=sum(tokens_B),
            sums=all_sums,
            log_ratios=self._peers.summed(joined).numpy(),
            input_tokens=sum(len(sequence.tokens) for sequence in sequences),
            computed_tokens=computed,
        )

    def optimizer_step(self, settings: OptimizerSettings, divisor: float) -> Mapping[str, float]:
        """Divide the gradient by ``divisor``, clip, step and clear; ``NonFiniteError`` if its norm is not finite."""
        return {"grad_norm": self._optimizer.step(settings, divisor), "lr": settings.lr}

    def discard_gradients(self) -> None:
        """Forget the gradient."""
        self._optimizer.clear()

    def end_step(self) -> None:
        """Forget what ``prepare_step`` kept."""
        self._data.clear()

    def save_state(self, directory: Path) -> None:
        """Write parameters and moments into ``directory``, see ``torch_state``."""
        self._optimizer.save(directory)

    def load_state(self, directory: Path) -> None:
        """Set what ``save_state`` wrote; ``CheckpointError`` if it is damaged or of another model."""
        self._optimizer.load(directory)

    @torch.no_grad()
    def load_exported(self, directory: Path) -> None:
        """Set the parameters that ``export`` wrote; ``CheckpointError`` if they are of another model or adapter."""
        if self._lora is not None:
            load_tensors(adapter_tensors(self._lora), directory / "adapter_model.safetensors")
        else:
            self._load_whole(directory)
        self._optimizer.follow_parameters()

    def _load_whole(self, directory: Path) -> None:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=self._causal.dtype, local_files_only=True
            )
            found = model_tensors(model)
            for name, tensor in model_tensors(self._causal).items():
                set_whole(tensor, found[name])
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{directory} has no weights of this model: {error}") from error

    @torch.no_grad()
    def export(self, directory: Path) -> None:
        """Write an adapter folder, or the whole model with its tokenizer, into ``directory``."""
        tensors = self._gathered()
        if not self._peers.writes:
            return
        if self._lora is not None:
            write_adapter(tensors, self._lora, self._path, directory)
        else:
            self._causal.save_pretrained(directory, state_dict=tensors)
            copy_tokenizer(self._path, directory)

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the current parameters, by their names in exported files: on the device, or in the host's memory of
        the first of several ranks, and nothing in the others.
        """
        tensors = self._gathered()
        return file_tensors(self._causal, tensors) if self._lora is None and tensors else tensors

    def _gathered(self) -> dict[str, torch.Tensor]:
        own = model_tensors(self._causal) if self._lora is None else adapter_tensors(self._lora)
        return self._peers.gathered(own)

    def adapter_config(self) -> dict[str, Any]:
        """The content of ``adapter_config.json``."""
        return adapter_config(self._lora, self._path)

    def logprobs(self, tokens: IntArray, start: int, temperature: float) -> FloatArray:
        """(T - start,) log-probabilities of ``tokens[start:]``, logits / ``temperature``; ``start`` is at least 1."""
        sequence = TrainingSequence(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            mask=np.arange(len(tokens)) >= start,
            ages=np.zeros(len(tokens), dtype=np.int32),
            advantage=0.0,
            weight=0.0,
            temperature=temperature,
        )
        return self._scoring.logprobs([sequence])[0].cpu().numpy()

    def _trained(self, arrays: Sequence[np.ndarray[Any, Any]], batch: Sequence[TrainingSequence]) -> torch.Tensor:
        """(N,) the values at trained tokens."""
        return self._tensor(np.concatenate([array[one.mask] for array, one in zip(arrays, batch, strict=True)]))

    def _repeated(self, values: Sequence[float], one: Pass) -> torch.Tensor:
        """(N,) each sequence's value for each of its trained tokens."""
        return self._tensor(np.repeat(np.asarray(values, dtype=np.float32), one.tokens_B))

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._causal.device)
