"""Ranks that somebody has started elsewhere: the address, the token, and rank 0's side of the connection."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import anyio
import anyio.to_thread
import pytest

from asyncrl.errors import ConfigError, LearnerError
from asyncrl.learning.ranks.driverlink import DriverLink
from asyncrl.learning.ranks.frames import Frame
from asyncrl.learning.ranks.launch import RemoteRanks, read_token, split_address
from asyncrl.learning.torch_learner import TorchLearner

TOKEN = b"a secret of sixteen"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A file with the token that both sides know."""
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    return file


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def test_who_knows_the_token_is_served_and_who_does_not_is_sent_away(token_file: Path, tmp_path: Path) -> None:
    """In a thread, rank 0 answers one request; then it ends with its driver, which is asked for."""
    address = f"127.0.0.1:{_free_port()}"
    links: SimpleQueue[DriverLink] = SimpleQueue()
    host, port = split_address(address)
    threading.Thread(target=lambda: links.put(DriverLink.accepted(host, port, TOKEN)), daemon=True).start()
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"another secret, as long")
    for _ in range(100):  # until it listens
        with pytest.raises(LearnerError) as refused:
            async with RemoteRanks(address=address, token_file=wrong)():
                pass
        if "another token" in str(refused.value):
            break
        await anyio.sleep(0.01)
    assert "has another token" in str(refused.value)
    async with RemoteRanks(address=address, token_file=token_file)() as link:
        rank = await anyio.to_thread.run_sync(links.get)
        await link.connection.send(Frame(header={"method": "close"}))
        assert (await anyio.to_thread.run_sync(rank.next_request)).header == {"method": "close"}
        rank.send(Frame(header={"result": 1}))
        answer = await link.connection.receive()
        while "alive" in answer.header:
            answer = await link.connection.receive()
        assert answer.header == {"result": 1}
        rank.close()


async def test_an_address_where_nobody_listens_is_an_error_that_says_what_to_do(token_file: Path) -> None:
    """With the key of the recipe."""
    with pytest.raises(LearnerError, match=r"model\.address 127\.0\.0\.1:\d+.*start the ranks first"):
        async with RemoteRanks(address=f"127.0.0.1:{_free_port()}", token_file=token_file)():
            pass


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    """With the key."""
    with pytest.raises(ConfigError, match=r"model\.address is"):
        split_address(address)


def test_a_token_that_is_missing_or_short_is_refused(tmp_path: Path) -> None:
    """A secret that can be guessed is none."""
    with pytest.raises(ConfigError, match=r"model\.token_file is .*a file with a secret"):
        read_token("model.token_file", tmp_path / "absent")
    (tmp_path / "short").write_text("1234", "utf-8")
    with pytest.raises(ConfigError, match="at least 16 characters, not 4"):
        read_token("model.token_file", tmp_path / "short")


def test_options_of_ranks_that_do_not_fit_together_are_refused(tmp_path: Path, token_file: Path) -> None:
    """Before anything is started."""
    model_path = tmp_path
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"model\.worker is 'fork'"):
        TorchLearner(model_path, worker="fork")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\.ranks is 0"):
        TorchLearner(model_path, ranks=0)
    with pytest.raises(ConfigError, match=r"model\.rank_timeout_s is 0"):
        TorchLearner(model_path, ranks=2, rank_timeout_s=0)
    with pytest.raises(ConfigError, match=r"address and model\.token_file belong together"):
        TorchLearner(model_path, address="host:29400")
    with pytest.raises(ConfigError, match=r"model\.ranks is 2.*left out beside model\.address"):
        TorchLearner(model_path, address="host:29400", token_file=token_file, ranks=2)
