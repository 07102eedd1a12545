"""Async tests run on asyncio; those marked ``virtual_clock`` run on the virtual clock instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import pytest
from blockbuster import blockbuster_ctx

from asyncrl.testing.clock import VirtualClock


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """One loop for each test: the mark decides which."""
    if item.get_closest_marker("virtual_clock"):
        return {"virtual": VirtualClock}
    return {"asyncio": asyncio.new_event_loop}


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
