"""Weights as the few large pieces that servers take: which tensors go together, one flat piece, and its bytes.

A bucket is one flat ``uint8`` tensor with the names, types and shapes of what is in it, SGLang's "flattened_bucket".
Imports torch, so it is imported where it is used. Nothing is read back from the bytes here, or anywhere in asyncrl.
"""

from __future__ import annotations

import base64
import io
import pickle  # noqa: TID251  SGLang's routes take no other format; written here, never read
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

__all__ = ["Bucket", "as_tensors", "make_bucket", "payload", "plan_buckets"]

_DEVICE_ARGUMENT = 6
# Of torch's function that opens a CUDA handle.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Some tensors as one: ``flat`` (N,) uint8 holds them one after the other, in the order of ``names``."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names in torch, such as "bfloat16"."""
    shapes: tuple[tuple[int, ...], ...]
    flat: torch.Tensor


def as_tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a learner as torch tensors; one without torch gives numpy arrays."""
    return {name: torch.as_tensor(value) for name, value in weights.items()}


def plan_buckets(weights: Mapping[str, torch.Tensor], limit_bytes: int) -> list[list[str]]:
    """All names, divided so that each part has at most ``limit_bytes``; a tensor that is larger stands alone."""
    # The widest types first: each tensor then begins at a multiple of its own width, which servers insist on.
    ordered = sorted(weights, key=lambda name: -weights[name].itemsize)
    parts: list[list[str]] = []
    room = 0
    for name in ordered:
        size = weights[name].nbytes
        if not parts or size > room:
            parts.append([])
            room = limit_bytes
        parts[-1].append(name)
        room -= size
    return parts


def make_bucket(weights: Mapping[str, torch.Tensor], names: Sequence[str], device: str | None = None) -> Bucket:
    """A bucket of the tensors ``names``, copied; on ``device``, wherever they are, or where they are."""
    tensors = [weights[name] if device is None else weights[name].to(device) for name in names]
    return Bucket(
        names=tuple(names),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        flat=torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]),
    )


def payload(bucket: Bucket, *, by_handle: bool) -> str:
    """What SGLang's routes for tensors take, in base64.

    ``by_handle``: a tensor on a GPU travels as a handle that only processes on this machine can open, and must live
    until they have answered. Otherwise its bytes travel.
    """
    entries, start = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind = getattr(torch, dtype)
        end = start + kind.itemsize * torch.Size(shape).numel()
        # A plain namespace, because the server's list of allowed classes has it, and has none of SGLang's own.
        entries.append(SimpleNamespace(name=name, shape=shape, dtype=kind, start_idx=start, end_idx=end))
        entries[-1].numel = end - start
        start = end
    handle = by_handle and bucket.flat.is_cuda
    content = {"flattened_tensor": bucket.flat if handle else bucket.flat.cpu(), "metadata": entries}
    buffer = io.BytesIO()
    pickler = _HandlePickler(buffer) if handle else pickle.Pickler(buffer)
    pickler.dump(content)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


class _HandlePickler(ForkingPickler):
    """Writes GPU tensors as handles, with the GPU's name in place of its number, which may differ at the server."""

    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        arguments = list(arguments)
        arguments[_DEVICE_ARGUMENT] = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        return rebuild, tuple(arguments)
