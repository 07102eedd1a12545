"""The real server, started by us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncrl.sampling.sglang import SGLang

if TYPE_CHECKING:
    from tests.realserver import RealServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


async def test_the_server_is_what_was_asked_for(sglang_server: RealServer) -> None:
    """It has the pinned version, our sizes, and takes adapters."""
    async with SGLang([sglang_server.url]).opened() as sampler:
        info = await sampler.live[0].server_info()
    assert info["version"] == "0.5.23"
    assert info["max_total_num_tokens"] == sglang_server.max_total_tokens
    assert (info["context_length"], info["max_lora_rank"]) == (sglang_server.context_length, sglang_server.lora_rank)
