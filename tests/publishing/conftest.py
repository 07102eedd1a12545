"""What the tests of publishing share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _virtual_threads(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("virtual_clock"):
        request.getfixturevalue("threads_in_place")
