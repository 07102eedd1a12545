"""Async tests run on asyncio; those marked ``virtual_clock`` run on the virtual clock instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from asyncrl.testing.clock import VirtualClock


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """One loop for each test: the mark decides which."""
    if item.get_closest_marker("virtual_clock"):
        return {"virtual": VirtualClock}
    return {"asyncio": asyncio.new_event_loop}
