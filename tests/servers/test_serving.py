"""``asyncrl serve``: which options belong to which server."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig
from asyncrl.servers import serving, sglangcommand
from asyncrl.servers.routes import METHODS
from asyncrl.servers.serving import read_options
from asyncrl.servers.sglangcommand import Command, Machine, SGLangOptions
from tests.modelfolder import write_model
from tests.servers.test_sglang_server import STAND_IN

HERE = Machine(interpreter=Path(sys.executable), has_sglang=True, installed=None, gpus=())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """As much of a model as is looked at."""
    return write_model(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-rank", "8"], "--lora-rank: is not an option of --backend embedded"),
        (["--", "--log-level", "debug"], "arguments after --: is not an option of --backend embedded"),
        (["--backend", "sglang", "--exit-with-stdin"], "--exit-with-stdin: is not an option of --backend sglang"),
        (["--backend", "sglang", "--lora-modules", "q_proj"], "need --lora-rank"),
        (["--backend", "sglang", "--tensor-parallel", "2"], "tensor_parallel is 2, but must be at most 1"),
        (["--backend", "sglang", "--host", "0.0.0.0"], "host is '0.0.0.0'"),
        (["--backend", "sglang", "--api-key-env", "ASYNCRL_UNSET"], "--api-key-env is 'ASYNCRL_UNSET'"),
        (["--backend", "sglang", "--", "--port", "1"], "arguments is '--port'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: list[str],
    message: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With exit code 2 and the option's name."""
    monkeypatch.setattr(Machine, "found", lambda: HERE)
    assert main(["serve", "--model", str(model), *options]) == 2
    assert message in capsys.readouterr().err


def test_options_become_those_of_the_server(model: Path) -> None:
    """The rank and the modules are one value there; the port has the default of both servers."""
    given: dict[str, Any] = {"model": model, "lora_rank": 8, "lora_modules": ["q_proj"], "max_loras_per_batch": 3}
    assert read_options(given | {"api_key": "hush", "arguments": ["--log-level", "debug"]}) == SGLangOptions(
        model=model,
        port=30_000,
        lora=LoraConfig(r=8, target_modules=("q_proj",)),
        max_loras_per_batch=3,
        api_key="hush",
        arguments=("--log-level", "debug"),
    )
    assert read_options({"model": model, "port": 0}) == SGLangOptions(model=model)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_server_runs_in_the_foreground_until_a_signal(number: signal.Signals, model: Path) -> None:
    """One JSON line when it is ready; its messages on stderr; nothing left after it."""
    script = f"""
import sys
from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.servers import serving, sglangcommand
from asyncrl.servers.routes import METHODS
from asyncrl.servers.sglangcommand import Command
from tests.modelfolder import write_model
sglangcommand.plan_command = lambda options, machine: Command(
    arguments=(sys.executable, "-c", {STAND_IN!r}, str(options.port)), environment={{}}, secrets={{}}
)
sys.exit(main(["serve", "--backend", "sglang", "--model", {str(model)!r}, "--port", "0"]))
"""
    async with await anyio.open_process([sys.executable, "-c", script]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        with anyio.fail_after(60):
            ready = orjson.loads(await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 1000))
            assert (ready["ready"], ready["pid"]) == (True, process.pid)
            assert ready["url"].startswith("http://127.0.0.1:")
            process.send_signal(number)
            assert await process.wait() == 0
            errors = b"".join([part async for part in process.stderr]).decode()
    assert "server_args" in errors
    assert f"{number.name}: stopping" in errors


@pytest.mark.slow
def test_a_server_that_ends_by_itself_is_a_failure(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, after what the server printed; 2 if it did not take its arguments."""
    for code, expected in ((7, 1), (2, 2)):

        def plan(options: SGLangOptions, machine: Machine, code: int = code) -> Command:
            script = f"import sys; print('what the server says'); sys.exit({code})"
            return Command(arguments=(sys.executable, "-c", script), environment={}, secrets={})

        monkeypatch.setattr(sglangcommand, "plan_command", plan)
        assert main(["serve", "--backend", "sglang", "--model", str(model), "--port", "0"]) == expected
        errors = capfd.readouterr().err
        assert "what the server says" in errors
        assert f"the SGLang server ended with exit code {code}" in errors


def test_help_lists_the_routes_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """All of the embedded server, each with its method."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = {tuple(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {(method, route) for route, method in METHODS.items()} <= shown


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_a_model_is_downloaded_only_if_that_is_asked_for(
    backend: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts, which is where this test ends it."""
    asked: list[tuple[str, bool]] = []

    def find(found: Path, *, download: bool, key: str) -> Path:
        asked.append((str(found), download))
        raise ConfigError(f"{key} is not there")

    monkeypatch.setattr(serving, "find_model", find)
    assert main(["serve", "--backend", backend, "--model", "own/model", "--download"]) == 2
    assert asked == [("own/model", True)]
    assert "--model is not there" in capsys.readouterr().err
