"""A PEFT folder, read strictly: what is not a plain LoRA adapter of the model that is served is refused by the field.

Options that SGLang refuses or ignores are refused here: ignoring them would be another policy than the trained one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from asyncrl.sampling.replies import shown

__all__ = ["Adapter", "read_adapter", "read_tensors"]

_ADAPTED = "base_model.model."
_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save")
_PLAIN = {"peft_type": "LORA", "bias": "none"}
_DEFAULTS = {"bias": "none"}
_SIDES = ("lora_A", "lora_B")
_MOST_RANK = 2**16
Adapter: TypeAlias = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""A LoRA adapter: module ("model.layers.3.self_attn.q_proj") -> (A, B), with the scale in B."""


def read_adapter(
    path: Path, *, shapes: Mapping[str, tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> Adapter:
    """Read the folder ``path``. ``shapes``: (out, in) of each module that an adapter may have.

    Raises ``ValueError`` or ``OSError`` for what is not a plain LoRA adapter of these modules.
    """
    rank, scale = _rank_and_scale(path / "adapter_config.json")
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in read_tensors(path / "adapter_model.safetensors").items():
        module, _, side = key.removesuffix(".weight").rpartition(".")
        pairs.setdefault(module.removeprefix(_ADAPTED), {})[side] = tensor
    if not pairs:
        raise ValueError(f"{path} has no tensors")
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for module, pair in pairs.items():
        if module not in shapes:
            raise ValueError(f"{path} adapts {shown(module)}, which is not a linear module of a layer")
        if sorted(pair) != sorted(_SIDES):
            raise ValueError(f"{path} has {shown(sorted(pair))} of {module}, and not {' and '.join(_SIDES)}")
        a, b = (pair[side] for side in _SIDES)
        out, inner = shapes[module]
        if (tuple(a.shape), tuple(b.shape)) != ((rank, inner), (out, rank)):
            raise ValueError(
                f"{path} does not fit the model that is served: {module} has {tuple(a.shape)} and {tuple(b.shape)}, "
                f"but must have {(rank, inner)} and {(out, rank)}"
            )
        modules[module] = (a.to(device, dtype), (b * scale).to(device, dtype))
    return modules


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; ``ValueError`` if it is none."""
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return tensors


def _rank_and_scale(file: Path) -> tuple[int, float]:
    config: Any = orjson.loads(file.read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"{file} is {shown(config)}, but must be an object")
    odd = {key: config[key] for key in _UNSUPPORTED if config.get(key)}
    odd |= {key: config.get(key) for key, plain in _PLAIN.items() if config.get(key, _DEFAULTS.get(key)) != plain}
    if odd:
        raise ValueError(f"{file} is not a plain LoRA adapter: it has {shown(odd)}")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= _MOST_RANK:
        raise ValueError(f"{file}: r is {shown(rank)}, but must be an integer from 1 to {_MOST_RANK}")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"{file}: lora_alpha is {shown(alpha)}, but must be a finite number")
    return rank, alpha / rank
