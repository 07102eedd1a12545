"""What a torch learner needs to go on where another process left off: trained parameters and Adam's moments.

Safetensors files with float32 tensors under ``parameter/<name>``, ``exp_avg/<name>``, .., for the trained parameters
only: the others are those of the model's folder. Read back, the next step gives the same bits.

One process writes ``state.safetensors``. Of several, each writes the rows that it has into a file of its own, with
their first row and the whole shape in the metadata, and each reads the rows that it needs from whichever files have
them: how many there were does not matter. (torch's own distributed checkpoints pickle their plan and send it pickled.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError
from asyncrl.learning.torch_peers import part_of, set_whole

__all__ = ["load_state", "load_tensors", "save_state"]

_FILE = "state.safetensors"
_PART = "state-{rank:05d}-of-{ranks:05d}.safetensors"
_PLACES = "places"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_state(masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Write the parameters ``masters`` of ``optimizer`` and its state into ``directory``."""
    if not any(isinstance(master, DTensor) for master in masters.values()):
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in _tensors(masters, optimizer)}
        save_file(tensors, directory / _FILE)
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts, places = {}, {}
    for key, tensor in _tensors(masters, optimizer):
        part, start = part_of(tensor.detach())
        # A small tensor may have no row here; what is not divided is the same in all ranks.
        if part.numel() and (rank == 0 or isinstance(tensor, DTensor)):
            parts[key] = part.cpu().contiguous()
            places[key] = [start, list(tensor.shape)]
    save_file(parts, directory / _PART.format(rank=rank, ranks=ranks), metadata={_PLACES: json.dumps(places)})


@torch.no_grad()
def load_state(masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Set what ``save_state`` wrote. Raises ``CheckpointError`` if it is damaged, or of another model or adapter."""
    with ExitStack() as stack:
        saved = _Saved(directory, stack)
        shapes = {key.partition("/")[2]: shape for key, shape in saved.shapes.items() if key.startswith("parameter/")}
        _require_same_shapes(saved.path, shapes, {name: tuple(master.shape) for name, master in masters.items()})
        for name, master in masters.items():
            part, _ = part_of(master)
            part.copy_(saved.rows_of(f"parameter/{name}", master))
            state: dict[str, Any] = optimizer.state[master]
            state.clear()
            for moment in _MOMENTS:
                key = f"{moment}/{name}"
                if key in saved.shapes:
                    state[moment] = saved.moment(key, master)


@torch.no_grad()
def load_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Set ``tensors`` to those of the same names in ``path``. Raises ``CheckpointError`` unless it has just these."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    shapes = [{name: tuple(tensor.shape) for name, tensor in group.items()} for group in (found, tensors)]
    _require_same_shapes(path, *shapes)
    for name, tensor in tensors.items():
        set_whole(tensor, found[name])


class _Saved:
    """The tensors that the files in a folder have together; open as long as ``stack``."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.path = directory / _FILE
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of whole tensors."""
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        # First rows, and files that have them from there on.
        paths = [self.path]
        if not self.path.is_file() and (parts := sorted(directory.glob("state-*-of-*.safetensors"))):
            ranks = int(parts[0].stem.rpartition("-")[2])
            paths = [directory / _PART.format(rank=rank, ranks=ranks) for rank in range(ranks)]
        for path in paths:
            self.path = path
            try:
                self._add(stack.enter_context(safe_open(path, framework="pt")))
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _add(self, file: Any) -> None:
        places = json.loads((file.metadata() or {}).get(_PLACES, "{}"))
        for key in file.keys():  # noqa: SIM118  it is no mapping
            start, shape = places.get(key) or (0, file.get_slice(key).get_shape())
            self.shapes[key] = tuple(shape)
            self._parts.setdefault(key, []).append((start, file))

    def rows_of(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """The rows of the tensor ``key`` that this process has of ``like``."""
        try:
            return self._rows(key, like)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error

    def moment(self, key: str, master: torch.Tensor) -> torch.Tensor:
        """The moment ``key`` of a parameter, divided as that is."""
        if not self.shapes[key]:
            [(_, file), *_] = self._parts[key]
            value: torch.Tensor = file.get_tensor(key)
            return value.to(master.device)
        rows = self.rows_of(key, master).to(master.device)
        if not isinstance(master, DTensor):
            return rows
        return DTensor.from_local(
            rows, master.device_mesh, master.placements, run_check=False, shape=master.shape, stride=master.stride()
        )

    def _rows(self, key: str, like: torch.Tensor) -> torch.Tensor:
        part, start = part_of(like)
        end = start + len(part)
        pieces = []
        for first, file in sorted(self._parts[key], key=lambda place: place[0]):
            rows = file.get_slice(key)
            low, high = max(start, first), min(end, first + rows.get_shape()[0])
            if low < high:
                pieces.append(rows[low - first : high - first])
        found = torch.cat(pieces) if pieces else torch.empty_like(part, device="cpu")
        if len(found) != len(part):
            raise CheckpointError(f"{self.path} and the files beside it lack rows of {key}")
        return found


def _require_same_shapes(path: Path, found: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> None:
    for name in {**found, **own}:
        shapes = [group.get(name) for group in (found, own)]
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
