"""The process group through which weights are broadcast, with the embedded server's side in a thread."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncrl.publishing.torch_group import TorchGroup
from asyncrl.servers.backend import Broadcast, GroupPlace
from asyncrl.servers.embedded.group import ReceivingGroup

pytestmark = pytest.mark.slow


def _open(name: str, *, timeout_s: float = 30.0) -> tuple[TorchGroup, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TorchGroup(listener, name=name, backend="gloo", world_size=2, timeout_s=timeout_s), port


def _receiver(name: str, port: int, *, timeout_s: float = 30.0) -> ReceivingGroup:
    place = GroupPlace(name=name, address="127.0.0.1", port=port, rank=1, world_size=2, backend="gloo")
    return ReceivingGroup(place, timeout_s=timeout_s)


def test_what_is_broadcast_arrives_and_a_closed_group_frees_who_waits() -> None:
    """Twice in one process, for a group is made anew when servers come and go."""
    flat = torch.arange(24, dtype=torch.uint8)
    sent = Broadcast(names=["a"], dtypes=["uint8"], shapes=[[24]], flattened=True)
    for name in ("first", "second"):
        group, port = _open(name)
        with ThreadPoolExecutor(1) as server:
            joining = server.submit(_receiver, name, port)
            group.join()
            receiver = joining.result()
            reading = server.submit(receiver.receive, sent)
            group.broadcast(flat)
            assert torch.equal(reading.result()["a"], flat)
            waiting = server.submit(receiver.receive, sent)
            group.close()
            with pytest.raises(RuntimeError):
                waiting.result()


def test_a_server_that_never_joins_is_not_waited_for_for_ever() -> None:
    """The error comes after the group's limit."""
    group, _ = _open("lonely", timeout_s=1.0)
    with pytest.raises(RuntimeError, match="timeout"):
        group.join()
    group.close()


def test_the_meeting_place_is_on_loopback_only() -> None:
    """torch by itself would listen on every interface."""
    group, port = _open("local", timeout_s=1.0)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    outside = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with outside, pytest.raises(OSError, match="refused"):
        outside.connect(("127.0.0.2", port))
    group.close()
