"""Async tests run on asyncio; those marked ``virtual_clock`` run on the virtual clock instead.

Those marked ``sglang`` are run by ``pytest -m sglang`` only, after ``asyncrl install-sglang``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio.to_thread
import pytest
from blockbuster import blockbuster_ctx

from asyncrl.machine import has_module
from asyncrl.sampling.install import installed_python
from asyncrl.testing.clock import VirtualClock
from tests.realserver import sglang_server
from tests.tinymodels import reference, tiny_adapter, tiny_model

__all__ = ["reference", "sglang_server", "tiny_adapter", "tiny_model"]

_LEFT_OUT = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``sglang`` are run when they are asked for: their server takes half a minute to start."""
    marked = [item for item in items if item.get_closest_marker("sglang")]
    if "sglang" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("sglang")]
        config.hook.pytest_deselected(items=marked)
        config.stash[_LEFT_OUT] = len(marked)
    elif marked and not (installed_python() or has_module("sglang")):
        raise pytest.UsageError("SGLang is not installed: run `asyncrl install-sglang` first")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out."""
    if left_out := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"{left_out} tests need a real SGLang server: `pytest -m sglang`")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """One loop for each test: the mark decides which."""
    if item.get_closest_marker("virtual_clock"):
        return {"virtual": VirtualClock}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def threads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the virtual clock a thread at work looks like idleness, so file work is done in place."""

    async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)


@pytest.fixture
def blocking_calls_are_errors() -> Iterator[None]:
    """A call of ours that would block the event loop raises instead."""
    with blockbuster_ctx("asyncrl") as blockbuster:
        # Options are checked where they are made, which a test does on the loop.
        for name in ("os.stat", "os.path.abspath"):
            blockbuster.functions[name].can_block_in("asyncrl/policy.py", "__init__")
            blockbuster.functions[name].can_block_in("asyncrl/learning/torch_learner.py", "__init__")
            blockbuster.functions[name].can_block_in("asyncrl/sampling/embedded/app.py", "__post_init__")
        yield
