"""What a torch learner needs to go on where another process left off: trained parameters and Adam's moments.

One safetensors file with float32 tensors under ``parameter/<name>``, ``exp_avg/<name>``, .., for the trained parameters
only: the others are those of the model's folder. Read back, the next step gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.errors import CheckpointError

__all__ = ["load_state", "load_tensors", "save_state"]

_FILE = "state.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_state(masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Write the parameters ``masters`` of ``optimizer`` and its state into ``directory``."""
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in _tensors(masters, optimizer)}
    save_file(tensors, directory / _FILE)


@torch.no_grad()
def load_state(masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Set what ``save_state`` wrote. Raises ``CheckpointError`` if it is damaged, or of another model or adapter."""
    path = directory / _FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    saved = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith("parameter/")}
    _require_same_shapes(path, saved, masters)
    for name, master in masters.items():
        master.copy_(saved[name])
        state: dict[str, Any] = optimizer.state[master]
        state.clear()
        for moment in _MOMENTS:
            if f"{moment}/{name}" in tensors:
                state[moment] = tensors[f"{moment}/{name}"].to(master.device)


@torch.no_grad()
def load_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Set ``tensors`` to those of the same names in ``path``. Raises ``CheckpointError`` unless it has just these."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    _require_same_shapes(path, found, tensors)
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def _require_same_shapes(path: Path, found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    for name in {**found, **own}:
        shapes = [None if name not in group else tuple(group[name].shape) for group in (found, own)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(f"{path} has {name} of shape {shapes[0]}, but the model has it of shape {shapes[1]}")


def _tensors(
    masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, master in masters.items():
        yield f"parameter/{name}", master
        # A parameter that has had no gradient yet has no moments.
        for moment, tensor in optimizer.state.get(master, {}).items():
            yield f"{moment}/{name}", tensor
