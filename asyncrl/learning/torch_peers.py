"""What the ranks of a learner do together, as its model sees it; and tensors of which each rank has a part.

A model asks for its share of the passes, sums up what all ranks found, and reads or sets whole tensors. Alone, each of
that is next to nothing: one code path for one process and for many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.prefixtrees import Pass

__all__ = ["Alone", "Peers", "part_of", "set_whole", "whole"]


class Peers(Protocol):
    """Real: ``Alone``, and ``ShardedPeers`` of ``ranks``. All ranks call the same methods in the same order."""

    @property
    def writes(self) -> bool:
        """True in the one rank that writes what is written once."""
        ...

    def load_device(self, name: str) -> torch.device:
        """Where a model is loaded that ``name`` will compute."""
        ...

    def shard(self, policy: PolicyModule, *, name: str) -> None:
        """Leave each rank its part of the parameters, on the device ``name``."""
        ...

    def shares(
        self, policy: PolicyModule, sequences: Sequence[TrainingSequence], max_tokens: int
    ) -> Iterable[tuple[Pass, float]]:
        """This rank's passes, and 1, or 0 for one that counts elsewhere: as many as any other rank has."""
        ...

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in each of them."""
        ...

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of whole tensors where ``writes``, nothing elsewhere; one after the other."""
        ...


class Alone:
    """One process."""

    writes = True

    def load_device(self, name: str) -> torch.device:
        """See ``Peers``."""
        from asyncrl.learning.modelloading import torch_device

        return torch_device(name)

    def shard(self, policy: PolicyModule, *, name: str) -> None:
        """See ``Peers``: there is nothing to do."""

    def shares(
        self, policy: PolicyModule, sequences: Sequence[TrainingSequence], max_tokens: int
    ) -> Iterable[tuple[Pass, float]]:
        """See ``Peers``: all of them."""
        return [(one, 1.0) for one in policy.passes(sequences, max_tokens)]

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """See ``Peers``."""
        return values

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Peers``: on the device."""
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that ranks may have parts of; then each of them has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank has of it, and at which row of the whole that begins. Parts are divided by rows."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), int(offset[0])


@torch.no_grad()
def set_whole(tensor: torch.Tensor, value: Any) -> None:
    """Set this rank's part of ``tensor`` to that of ``value``, which is whole."""
    part, start = part_of(tensor)
    if part.ndim:
        value = value[start : start + len(part)]
    part.copy_(value)
