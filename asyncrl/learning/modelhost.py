"""Where a learner's model lives: in a thread of this process, or in processes of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.concurrency.worker import Worker
from asyncrl.errors import LearnerError

if TYPE_CHECKING:
    from asyncrl.learning.torch_model import TorchModel
    from asyncrl.learning.torch_peers import Peers

__all__ = ["ModelHost", "ModelOptions", "ThreadHost", "load_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What the model is made from. Frozen and of plain values: it travels to other processes."""

    path: Path
    adapter: Path | None
    """Folder of an adapter to start from."""
    options: Mapping[str, Any]
    """The other keywords of ``TorchModel``."""


class ModelHost(Protocol):
    """Holds one ``TorchModel`` and calls its methods, one at a time. Real: ``ThreadHost``, ``RanksHost``.

    A call that runs is not interrupted: cancellation waits for its end, so that whatever it changes is whole.
    """

    async def open(self) -> None:
        """Load the model. Called once."""
        ...

    async def call(self, method: str, **arguments: Any) -> Any:
        """What the model's ``method`` returns or raises. Raises ``LearnerError`` if the host is not open."""
        ...

    async def close(self) -> None:
        """Free the model."""
        ...


class ThreadHost:
    """The model in a thread of its own."""

    def __init__(self, options: ModelOptions) -> None:
        self._options = options
        self._worker = Worker("asyncrl-learner")
        self._model: TorchModel | None = None

    async def open(self) -> None:
        """Load the model; importing torch and transformers takes up to tens of seconds on a small machine."""
        self._model = await self._worker.run(load_model, self._options)

    async def call(self, method: str, **arguments: Any) -> Any:
        """See ``ModelHost``."""
        if self._model is None:
            raise LearnerError("the learner is not open")
        return await self._worker.run(getattr(self._model, method), **arguments)

    async def close(self) -> None:
        """Free the model and end the thread after its last call."""
        self._model = None
        self._worker.close()


def load_model(options: ModelOptions, peers: Peers | None = None) -> TorchModel:
    """Load the model, and the adapter that it starts from; ``peers``: of a rank, None alone. Blocking."""
    from asyncrl.learning.torch_model import TorchModel

    model = TorchModel(options.path, **options.options, peers=peers)
    if options.adapter is not None:
        model.load_exported(options.adapter)
    return model
