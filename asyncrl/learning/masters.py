"""The optimizer: Adam on float32 masters of the trained parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrl.errors import NonFiniteError
from asyncrl.learning.base import OptimizerSettings
from asyncrl.learning.torch_peers import whole
from asyncrl.learning.torch_state import load_state, save_state

__all__ = ["MasterAdam"]


class MasterAdam:
    """Owns the masters, their gradients and Adam's moments; ``named``: the parameters that are trained."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = list(named.values())
        self._masters = {name: _master(parameter) for name, parameter in named.items()}
        self._adam = torch.optim.AdamW(self._masters.values(), lr=0.0, fused=True)

    def step(self, settings: OptimizerSettings, divisor: float) -> float:
        """Divide the gradient by ``divisor``, clip, step and clear. Returns its norm, which must be finite."""
        masters = list(self._masters.values())
        gradients = [master.grad for master in masters if master.grad is not None]
        for gradient in gradients:
            gradient.div_(divisor)
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if not torch.isfinite(norm):
            self.clear()
            raise NonFiniteError(f"the gradient norm is {float(norm)}; no step was taken")
        if settings.grad_clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, settings.grad_clip_norm, norm)
        for group in self._adam.param_groups:
            group.update(
                lr=settings.lr,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
        self._adam.step()
        self._copy_to_parameters()
        self.clear()
        return float(norm)

    def clear(self) -> None:
        """Forget the gradient."""
        self._adam.zero_grad(set_to_none=True)

    def save(self, directory: Path) -> None:
        """Write masters and moments into ``directory``, see ``torch_state``."""
        save_state(self._masters, self._adam, directory)

    def load(self, directory: Path) -> None:
        """Set what ``save`` wrote; ``CheckpointError`` if it is damaged or of another model."""
        load_state(self._masters, self._adam, directory)
        self._copy_to_parameters()

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Take over parameters that were set from elsewhere."""
        for parameter, master in zip(self._parameters, self._masters.values(), strict=True):
            if parameter is not master:
                master.copy_(parameter)

    @torch.no_grad()
    def _copy_to_parameters(self) -> None:
        for parameter, master in zip(self._parameters, self._masters.values(), strict=True):
            if parameter is not master:
                parameter.copy_(master)


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
