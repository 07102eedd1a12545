"""What the tests of faults share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio.to_thread
import pytest


@pytest.fixture
def threads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the virtual clock a thread at work looks like idleness, so file work is done in place."""

    async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
