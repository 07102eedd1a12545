"""A transformers model from its folder, ready to be trained: on its device, with its adapter, without dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig

__all__ = ["checkpoint_layers", "load_causal", "torch_device", "with_adapter"]


def load_causal(path: Path, *, dtype: str, device: torch.device) -> Any:
    """The causal language model in evaluation mode: dropout would make the learner disagree with the sampler."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    # SDPA leaves out the soft cap of a model's attention. None: SDPA if the model has it.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=getattr(torch, dtype),
        attn_implementation="eager" if capped else None,
        local_files_only=True,
    )
    return model.to(device).eval()


def torch_device(name: str) -> torch.device:
    """``name`` as torch calls it; "auto" is the GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError.for_value("model.device", name, "'auto' or a device of torch such as 'cuda:0'") from error


def checkpoint_layers(model: Any) -> None:
    """Have the layers compute their activations again in the backward pass."""
    # Newer versions of transformers have renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # They do so only in training mode. The modules inside, where dropout would be, stay in evaluation mode.
            module.training = True


def with_adapter(model: Any, lora: LoraConfig) -> Any:
    """Put a fresh adapter that changes nothing yet into ``model``; all else is frozen."""
    import peft

    targets = lora.target_modules
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    # PEFT is content if one of them is there.
    lora.require_targets(linear)
    if targets == "all-linear" and _has_fused_experts(model):
        # PEFT would adapt experts and their router too, which no server takes an adapter of.
        output = model.get_output_embeddings()
        targets = tuple(sorted({name.rpartition(".")[2] for name in linear if model.get_submodule(name) is not output}))
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


def _has_fused_experts(model: Any) -> bool:
    """Whether a layer keeps the weights of all its experts in one tensor."""
    return any(parameter.dim() == 3 for parameter in model.parameters())
