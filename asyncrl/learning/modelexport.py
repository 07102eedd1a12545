"""The names and values of a model's tensors in the files that servers read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

__all__ = ["adapter_config", "adapter_tensors", "file_tensors", "model_tensors", "write_adapter"]


def write_adapter(tensors: Mapping[str, torch.Tensor], adapted: Any, base: Path, directory: Path) -> None:
    """Write the folder of an adapter of the model in ``base``, in PEFT's format; ``tensors``: ``adapter_tensors``."""
    whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "adapter_model.safetensors")
    config = orjson.dumps(adapter_config(adapted, base), option=orjson.OPT_INDENT_2)
    (directory / "adapter_config.json").write_bytes(config)


def adapter_config(adapted: Any, base: Path) -> dict[str, Any]:
    """The content of ``adapter_config.json``: plain scaling, which is all that SGLang reads."""
    config = adapted.peft_config["default"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        # PEFT may keep whole paths ("model.layers.0.mlp.down_proj"); servers look for the last name.
        "target_modules": sorted({name.rpartition(".")[2] for name in config.target_modules}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }


def adapter_tensors(adapted: Any) -> dict[str, torch.Tensor]:
    """The adapter's own, by their names in its file."""
    import peft

    tensors: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return tensors


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors by their names in it: each once, though layers may share it."""
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    shared -= {name for name, _ in model.named_parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in shared}


def file_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``model_tensors``, which must be whole, by the names that they have in its files."""
    named: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return named
