"""Stands in for the compiled kernel package that SGLang's CPU engine imports.

Not part of asyncrl: it is first on the module path of SGLang's processes when they serve on a CPU, and nowhere else.
The kernels named here are for speculative decoding, which is refused without them; all else has a form in torch that
SGLang takes by itself. It is also the place where SGLang is kept from pinning memory, which torch cannot do without a
GPU's driver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0"

_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
_FACTORIES = (
    *("tensor", "empty", "zeros", "ones", "full", "arange", "empty_strided"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)


def _refused(name: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} is a compiled kernel, and this server runs without them")

    return refuse


def _without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return factory(*arguments, **options)

    return make


def _same(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    return tensor


globals().update({name: _refused(name) for name in _KERNELS})

if not torch.cuda.is_available():
    for _name in _FACTORIES:
        setattr(torch, _name, _without_pinning(getattr(torch, _name)))
    torch.Tensor.pin_memory = _same  # type: ignore[method-assign, assignment]
