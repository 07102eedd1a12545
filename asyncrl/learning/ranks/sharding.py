"""The peers of a model whose parameters are divided over ranks, by torch's FSDP2 (``fully_shard``).

Each rank has some rows of every parameter, its gradient and its moments. A layer's weights are gathered before it
computes and dropped after it; its gradient is summed over ranks as it is made, and never divided here: the step's
divisor is that of all ranks. LoRA: the frozen weights are divided in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.errors import ConfigError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.modelloading import torch_device
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.prefixtrees import Pass
from asyncrl.learning.ranks.balance import rounds, time_of
from asyncrl.learning.torch_peers import whole

__all__ = ["ShardedPeers"]

_SLACK = 1.1
# Passes of exactly an equal part of all tokens would often leave a few tokens for one more.


class ShardedPeers:
    """See ``Peers``: the ranks of torch's default process group."""

    def __init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._mesh: Any = None

    @property
    def writes(self) -> bool:
        """See ``Peers``: rank 0."""
        return self._rank == 0

    def load_device(self, name: str) -> torch.device:
        """See ``Peers``: the host's memory, for a GPU needs to hold its part only."""
        self._device(name)
        return torch.device("cpu")

    def shard(self, policy: PolicyModule, *, name: str) -> None:
        """See ``Peers``."""
        device = self._device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self._mesh is None:
            self._mesh = init_device_mesh(device.type, (self._ranks,))
        mixed = _in_float32(policy)
        layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
        for module in (*layers, policy):
            # Also the outermost, which would else keep its weights when nothing is trained on a pass, also old ones.
            fully_shard(module, mesh=self._mesh, mp_policy=mixed, reshard_after_forward=True)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def shares(
        self, policy: PolicyModule, sequences: Sequence[TrainingSequence], max_tokens: int
    ) -> Iterable[tuple[Pass, float]]:
        """See ``Peers``."""
        found = self._passes(policy, sequences, max_tokens)
        for shares in rounds([one.cost for one in found], self._ranks):
            share = shares[self._rank]
            yield found[share.index], float(share.counts)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """See ``Peers``."""
        dist.all_reduce(values)
        return values

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See ``Peers``: in rank 0's host memory; elsewhere each is gone before the next comes."""
        found = {}
        for name, tensor in tensors.items():
            value = whole(tensor.detach())
            if self.writes:
                found[name] = value.cpu().clone()
        return found

    def _passes(self, policy: PolicyModule, sequences: Sequence[TrainingSequence], max_tokens: int) -> list[Pass]:
        """Passes of at most ``max_tokens``, or smaller ones if that makes the ranks more equal and so the step faster.

        All ranks find the same.
        """
        large = policy.passes(sequences, max_tokens)
        if not large:
            return large
        count = -(-len(large) // self._ranks) * self._ranks
        equal = int(_SLACK * sum(one.computed_tokens for one in large) / count) + 1
        if equal >= max_tokens:
            return large
        small = policy.passes(sequences, equal)
        return min(large, small, key=lambda passes: time_of([one.cost for one in passes], self._ranks))

    def _device(self, name: str) -> torch.device:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch_device(name)
        if ":" in name:
            raise ConfigError.for_value("model.device", name, "'auto' or a kind of device with several ranks, 'cuda'")
        if device.type == "cuda":
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return device


def _in_float32(policy: PolicyModule) -> MixedPrecisionPolicy:
    """Keep trained 16-bit parameters in float32, and compute in 16 bits as before.

    In 16 bits most updates are smaller than the rounding, and would be lost.
    """
    trained = {one.dtype for one in policy.parameters() if one.requires_grad}
    if trained <= {torch.float32}:
        return MixedPrecisionPolicy()
    [dtype] = trained
    policy.float()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
