"""The learner's compute: forward, backward, step and export of one transformers model. Blocking; runs in the worker.

Logits exist only for trained tokens: hidden states are gathered first, and only those rows meet the output layer. A
pass is deterministic on a CPU: the same sequences give the same sums to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from asyncrl.errors import CheckpointError, ConfigError, NonFiniteError
from asyncrl.learning.adapterfolder import copy_tokenizer
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.learning.losses import Loss, LossInputs
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.torch_state import load_state, load_tensors, save_state
from asyncrl.types import FloatArray, IntArray

__all__ = ["TorchModel", "micro_batches"]


class TorchModel:
    """Owns parameters, gradients and the optimizer's state; see ``TorchLearner`` for the options."""

    def __init__(
        self,
        path: Path,
        *,
        lora: LoraConfig | None,
        dtype: str,
        device: str,
        threads: int | None,
        micro_batch_tokens: int,
        gradient_checkpointing: bool,
        seed: int,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        transformers_logging.disable_progress_bar()
        self._path = path
        self._device = _device(device)
        self._micro_batch_tokens = micro_batch_tokens
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._lora: Any = None if lora is None else _with_adapter(model, lora)
        self._causal: Any = model.to(self._device)
        # Dropout would make the learner disagree with the sampler.
        self._causal.eval()
        if gradient_checkpointing:
            _checkpoint_layers(self._causal)
        self._parameters = [parameter for parameter in self._causal.parameters() if parameter.requires_grad]
        self._masters = [_master(parameter) for parameter in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=0.0, fused=True)
        self._proximal: dict[int, tuple[TrainingSequence, torch.Tensor]] = {}
        self._require_plain_logits()

    def prepare_step(self, sequences: Sequence[TrainingSequence], loss: Loss) -> None:
        """Keep the log-probabilities of these sequences as they are now, if ``loss`` needs them."""
        if not loss.token_data:
            return
        with torch.no_grad():
            for batch in self._batches(sequences):
                logprobs, _ = self._trained_logprobs(batch)
                for sequence, part in zip(batch, logprobs.split(_trained_tokens(batch)), strict=True):
                    # The sequence is kept with it: an id is only unique while its object lives.
                    self._proximal[id(sequence)] = (sequence, part)

    def forward_backward(self, sequences: Sequence[TrainingSequence], loss: Loss, updates: int = 0) -> ChunkResult:
        """Add the gradient of ``sum(weight * per-token loss)``; returns sums over the trained tokens."""
        sums: defaultdict[str, float] = defaultdict(float)
        tokens = 0
        log_ratios: dict[int, torch.Tensor] = {}
        for batch in self._batches(sequences):
            logprobs, entropy = self._trained_logprobs(batch)
            proximal = [self._proximal[id(sequence)][1] for sequence in batch] if loss.token_data else []
            sampled = self._tensor(np.concatenate([one.logprobs[one.mask] for one in batch]))
            ratios = (logprobs.detach() - sampled).split(_trained_tokens(batch))
            log_ratios |= {id(sequence): part for sequence, part in zip(batch, ratios, strict=True)}
            output = loss.per_token(
                LossInputs(
                    logprobs=logprobs,
                    sampled_logprobs=sampled,
                    advantages=self._repeated([sequence.advantage for sequence in batch], batch),
                    ages=self._tensor(np.concatenate([one.ages[one.mask] for one in batch])),
                    tokens_B=_trained_tokens(batch),
                    updates=updates,
                    data={"proximal": torch.cat(proximal)} if proximal else {},
                )
            )
            weighted = (output.loss * self._repeated([sequence.weight for sequence in batch], batch)).sum()
            weighted.backward()
            tokens += len(logprobs)
            sums["loss"] += float(weighted.detach())
            sums["entropy"] += float(entropy.sum())
            for name, values in output.diagnostics.items():
                sums[name] += float(values.sum())
        input_tokens = sum(len(sequence.tokens) for sequence in sequences)
        return ChunkResult(
            tokens=tokens,
            sums=dict(sums),
            log_ratios=torch.cat([torch.empty(0), *(log_ratios[id(one)].cpu() for one in sequences)]).numpy(),
            input_tokens=input_tokens,
            computed_tokens=input_tokens,
        )

    def optimizer_step(self, settings: OptimizerSettings, divisor: float) -> Mapping[str, float]:
        """Divide the gradient by ``divisor``, clip, step and clear; ``NonFiniteError`` if its norm is not finite."""
        gradients = [master.grad for master in self._masters if master.grad is not None]
        for gradient in gradients:
            gradient.div_(divisor)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            self.discard_gradients()
            raise NonFiniteError(f"the gradient norm is {float(norm)}; no step was taken")
        if settings.grad_clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._masters, settings.grad_clip_norm, norm)
        for group in self._optimizer.param_groups:
            group.update(
                lr=settings.lr,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
        self._optimizer.step()
        self._follow_masters()
        self.discard_gradients()
        return {"grad_norm": float(norm), "lr": settings.lr}

    def discard_gradients(self) -> None:
        """Forget the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def end_step(self) -> None:
        """Forget what ``prepare_step`` kept."""
        self._proximal.clear()

    def save_state(self, directory: Path) -> None:
        """Write parameters and moments into ``directory``, see ``torch_state``."""
        save_state(self._named_masters(), self._optimizer, directory)

    def load_state(self, directory: Path) -> None:
        """Set what ``save_state`` wrote; ``CheckpointError`` if it is damaged or of another model."""
        load_state(self._named_masters(), self._optimizer, directory)
        self._follow_masters()

    @torch.no_grad()
    def load_exported(self, directory: Path) -> None:
        """Set the parameters that ``export`` wrote; ``CheckpointError`` if they are of another model or adapter."""
        if self._lora is not None:
            load_tensors(_adapter_tensors(self._lora), directory / "adapter_model.safetensors")
        else:
            self._load_whole(directory)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                master.copy_(parameter)

    def _load_whole(self, directory: Path) -> None:
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=self._causal.dtype, local_files_only=True
            )
            self._causal.load_state_dict(model.state_dict())
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{directory} has no weights of this model: {error}") from error

    @torch.no_grad()
    def export(self, directory: Path) -> None:
        """Write an adapter folder, or the whole model with its tokenizer, into ``directory``."""
        if self._lora is None:
            self._causal.save_pretrained(directory)
            copy_tokenizer(self._path, directory)
            return
        tensors = {name: tensor.cpu().contiguous() for name, tensor in _adapter_tensors(self._lora).items()}
        save_file(tensors, directory / "adapter_model.safetensors")
        config = orjson.dumps(self.adapter_config(), option=orjson.OPT_INDENT_2)
        (directory / "adapter_config.json").write_bytes(config)

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the current parameters on the device, by their names in exported files."""
        tensors = _adapter_tensors(self._lora) if self._lora is not None else _file_tensors(self._causal)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def adapter_config(self) -> dict[str, Any]:
        """The content of ``adapter_config.json``: plain scaling, which is all that SGLang reads."""
        config = self._lora.peft_config["default"]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._path),
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "lora_dropout": 0.0,
            # PEFT may keep whole paths ("model.layers.0.mlp.down_proj"); servers look for the last name.
            "target_modules": sorted({name.rpartition(".")[2] for name in config.target_modules}),
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
        }

    @torch.no_grad()
    def logprobs(self, tokens: IntArray, start: int, temperature: float) -> FloatArray:
        """(T - start,) log-probabilities of ``tokens[start:]``, logits / ``temperature``."""
        mask = np.arange(len(tokens)) >= start
        sequence = TrainingSequence(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            mask=mask,
            ages=np.zeros(len(tokens), dtype=np.int32),
            advantage=0.0,
            weight=0.0,
            temperature=temperature,
        )
        logprobs, _ = self._trained_logprobs([sequence])
        return logprobs.cpu().numpy()

    def _named_masters(self) -> dict[str, torch.Tensor]:
        names = [name for name, parameter in self._causal.named_parameters() if parameter.requires_grad]
        return dict(zip(names, self._masters, strict=True))

    @torch.no_grad()
    def _follow_masters(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter is not master:
                parameter.copy_(master)

    @torch.no_grad()
    def _require_plain_logits(self) -> None:
        """Refuse models that scale or cap what their output layer gives, which the passes here would leave out."""
        ids = torch.arange(1, 4, device=self._device)[None]
        hidden = self._causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
        plain = self._causal.get_output_embeddings()(hidden).float()
        logits = self._causal(input_ids=ids, use_cache=False).logits.float()
        if not torch.allclose(plain, logits, rtol=1e-3, atol=1e-3):
            kind = type(self._causal).__name__
            raise ConfigError(f"{kind} changes its logits after the output layer, which the learner cannot reproduce")

    def _batches(self, sequences: Sequence[TrainingSequence]) -> Iterator[list[TrainingSequence]]:
        lengths = [len(sequence.tokens) for sequence in sequences]
        for indices in micro_batches(lengths, max_tokens=self._micro_batch_tokens):
            yield [sequences[index] for index in indices]

    def _trained_logprobs(self, batch: Sequence[TrainingSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """(N,) float32 log-probabilities of the trained tokens, sequence after sequence, and (N,) entropies."""
        longest = max(len(sequence.tokens) for sequence in batch)
        ids = np.zeros((len(batch), longest), dtype=np.int64)
        mask = np.zeros((len(batch), longest), dtype=np.bool_)
        for row, sequence in enumerate(batch):
            length = len(sequence.tokens)
            ids[row, :length] = sequence.tokens
            mask[row, :length] = sequence.mask
        input_ids = self._tensor(ids)  # (B, T)
        trained = self._tensor(mask)[:, 1:]  # (B, T - 1)
        # The padding is on the right, where causal attention never looks from a token: it needs no attention mask.
        states = self._causal.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, D)
        hidden = states[:, :-1][trained]  # (N, D): the state before each trained token
        logits = self._causal.get_output_embeddings()(hidden).float()  # (N, V)
        temperatures = self._repeated([sequence.temperature for sequence in batch], batch)
        log_softmax = torch.log_softmax(logits / temperatures[:, None], dim=-1)
        with torch.no_grad():
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        targets = input_ids[:, 1:][trained]
        return log_softmax.gather(-1, targets[:, None]).squeeze(-1), entropy

    def _repeated(self, values: Sequence[float], batch: Sequence[TrainingSequence]) -> torch.Tensor:
        """(N,) each sequence's value for each of its trained tokens."""
        return self._tensor(np.repeat(np.asarray(values, dtype=np.float32), _trained_tokens(batch)))

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _trained_tokens(batch: Sequence[TrainingSequence]) -> list[int]:
    return [int(sequence.mask.sum()) for sequence in batch]


def micro_batches(lengths_B: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: of similar length, at most ``max_tokens`` with padding.

    A sequence that is longer than ``max_tokens`` gets a micro-batch of its own. Longest first, so that a batch that
    does not fit into memory fails at once and not after minutes. Deterministic.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths_B)), key=lambda index: (-lengths_B[index], index)):
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths_B[index]
    return batches


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError.for_value("model.device", name, "'auto' or a device of torch such as 'cuda:0'") from error


def _checkpoint_layers(model: Any) -> None:
    """Have the layers compute their activations again in the backward pass."""
    # Newer versions of transformers have renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # They do so only in training mode. The modules inside, where dropout would be, stay in evaluation mode.
            module.training = True


def _master(parameter: torch.Tensor) -> torch.Tensor:
    """What the optimizer changes: a float32 parameter itself, or a float32 copy that takes over each gradient.

    In 16 bits most updates are smaller than the rounding, and would be lost.
    """
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().float()

    def take_over(source: torch.Tensor) -> None:
        if source.grad is not None:
            gradient = source.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            source.grad = None

    parameter.register_post_accumulate_grad_hook(take_over)
    return master


def _with_adapter(model: Any, lora: LoraConfig) -> Any:
    """Put a fresh adapter that changes nothing yet into ``model``; all else is frozen."""
    import peft

    targets = lora.target_modules
    # PEFT is content if one of them is there.
    lora.require_targets(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # a float is as good
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError.for_value("lora.target_modules", targets, f"modules of this model: {error}") from error


def _adapter_tensors(adapted: Any) -> dict[str, torch.Tensor]:
    import peft

    tensors: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return tensors


def _file_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors under the names that they have in its files: each once, though layers may share it."""
    kept: dict[int, str] = {}
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, tensor in state.items():
        kept.setdefault(tensor.data_ptr(), name)
    named: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: state[name] for name in kept.values()})
    return named
