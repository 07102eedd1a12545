"""The ranks of a learner among each other: who is who, and what all of them hear.

Requests go from rank 0 to the others as tensors of bytes, and how each fared comes back as texts in torchrun's store;
nothing is pickled. Imports torch only where there are others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from asyncrl.learning.ranks.frames import Frame, read_frame

if TYPE_CHECKING:
    import torch

__all__ = ["World"]

_NEVER = timedelta(days=365)
_FAILURE = "asyncrl/failure"


class World:
    """All ranks, seen from one of them. ``timeout_s``: how long they wait for each other while they compute."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._requests = 0
        if self.size == 1:
            return
        import torch.distributed as dist

        dist.init_process_group(timeout=timedelta(seconds=timeout_s))
        # Between two requests any time may pass: the others wait for the next one in a group of its own.
        self._waiting: Any = dist.new_group(backend="gloo", timeout=_NEVER)
        self._store = self._own_store()

    @staticmethod
    def is_first() -> bool:
        """True in rank 0, which the driver speaks to."""
        return os.environ.get("RANK", "0") == "0"

    def tell(self, frame: Frame) -> None:
        """Rank 0: give ``frame`` to the others."""
        if self.size > 1:
            import torch

            content = torch.frombuffer(bytearray(frame.encoded()), dtype=torch.uint8)
            self._broadcast(torch.tensor([len(content)]))
            self._broadcast(content)

    def told(self) -> Frame:
        """The others: wait for what rank 0 tells."""
        import torch

        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length)
        content = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(content)
        whole = content.numpy()
        at = 0

        def receive(count: int) -> bytes:
            nonlocal at
            at += count
            return whole[at - count : at].tobytes()

        return read_frame(receive)

    def first_refusal(self, text: str | None) -> str | None:
        """What the first of the ranks that refused the request says, in all ranks; ``text``: this one's, or None."""
        self._requests += 1
        if self.size == 1:
            return text
        import torch
        import torch.distributed as dist

        refusals = torch.tensor([self.rank if text is not None else self.size])
        key = f"asyncrl/refusal/{self._requests}/{self.rank}"
        if text is not None:
            self._store.set(key, text)
        dist.all_reduce(refusals, op=dist.ReduceOp.MIN, group=self._computing)
        first = int(refusals)
        if first == self.size:
            return None
        return str(self._store.get(f"asyncrl/refusal/{self._requests}/{first}").decode())

    def report_failure(self, text: str) -> None:
        """Any rank: say why it ends, to whoever watches."""
        if self.size > 1:
            self._store.set(_FAILURE, text)

    def watch_failures(self, act: Callable[[str], None]) -> None:
        """Call ``act``, in a thread, with what the first failing rank has said."""
        if self.size == 1:
            return
        store = self._own_store()  # another connection: waiting blocks it

        def watch() -> None:
            try:
                store.wait([_FAILURE], _NEVER)
                text = store.get(_FAILURE).decode()
            except RuntimeError as error:  # torchrun is gone
                text = f"the store of torchrun has ended: {error}"
            act(text)

        threading.Thread(target=watch, daemon=True).start()

    def leave(self) -> None:
        """End the group in order."""
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    @property
    def _computing(self) -> Any:
        import torch.distributed as dist

        return dist.group.WORLD

    def _broadcast(self, tensor: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(tensor, src=0, group=self._waiting)

    @staticmethod
    def _own_store() -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, wait_for_workers=False)
