"""Async tests run on asyncio; those marked ``virtual_clock`` run on the virtual clock instead.

Those marked ``sglang`` are run by ``pytest -m sglang`` only, after ``asyncrl install-sglang``.

Every run draws the same: global generators are seeded before each test, Hypothesis derives its examples from the test,
and ``test_draws.py`` keeps generators without a seed out. Whatever else is needed to run the tests is said here or in
pyproject.toml, so that ``pytest`` alone is what CI runs.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio.to_thread
import hypothesis
import numpy as np
import pytest
from blockbuster import blockbuster_ctx

from asyncrl.servers.install import installed_python
from asyncrl.servers.machine import has_module
from asyncrl.testing.clock import VirtualClock
from tests.realserver import sglang_server
from tests.tinymodels import reference, tiny_adapter, tiny_model

__all__ = ["reference", "sglang_server", "tiny_adapter", "tiny_model"]

# No deadline: an example that takes 0.1 s alone takes 1 s beside other work.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_configure() -> None:
    """torch here and in the processes that tests start uses one thread, unless OMP_NUM_THREADS says more.

    The models are tiny, and two threads that spin on a shared core are slower than one that works.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Some hundred processes import torch; where nothing compiled is kept, each of them compiles it again, for seconds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite is shared out among one process per core, unless ``-n`` says how many; named tests run in one.

    So do those of the real server, which has the memory of the machine, and what a debugger is to stop in.
    """
    options = config.option
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and "sglang" not in options.markexpr
    is_told = hasattr(config, "workerinput") or options.usepdb or getattr(options, "numprocesses", 0) is not None
    if is_whole and not is_told:
        options.numprocesses, options.dist = os.cpu_count(), "worksteal"


def pytest_collection_finish() -> None:
    """What is imported by now lives to the end: a full collection that looked at it again would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``sglang`` are run when they are asked for: their server takes half a minute to start."""
    marked = [item for item in items if item.get_closest_marker("sglang")]
    if "sglang" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("sglang")]
        config.hook.pytest_deselected(items=marked)
    elif marked and not (installed_python() or has_module("sglang")):
        raise pytest.UsageError("SGLang is not installed: run `asyncrl install-sglang` first")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out."""
    if "sglang" not in config.option.markexpr:
        terminalreporter.write_line("left out: tests that need a real SGLang server, `pytest -m sglang`")


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


@pytest.fixture(autouse=True)
def draws_repeat() -> None:
    """What draws from a global generator, here or in a library, draws the same in every run and order of tests."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  it is seeded for others
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def blocking_calls_are_errors() -> Iterator[None]:
    """A call of ours that would block the event loop raises instead."""
    with blockbuster_ctx("asyncrl") as blockbuster:
        # Options are checked where they are made, which a test does on the loop.
        for name in ("os.stat", "os.path.abspath", "os.listdir", "os.scandir"):
            blockbuster.functions[name].can_block_in("asyncrl/publishing/policy.py", "__init__")
            blockbuster.functions[name].can_block_in("asyncrl/learning/torch_learner.py", "__init__")
            blockbuster.functions[name].can_block_in("asyncrl/servers/embedded/options.py", "__post_init__")
        yield
