"""The embedded server as a whole: options, key, what it says about itself, and how it fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.servers.embedded.options import ServerOptions
from tests.modelfolder import write_model
from tests.servers.embedded.calls import Serving, body, post


async def test_a_control_call_without_its_field_is_refused(serving: Serving) -> None:
    """By name, and not with a status of 500."""
    async with serving() as client:
        for route, field in [
            ("/update_weights_from_disk", "model_path"),
            ("/update_weight_version", "new_version"),
            ("/load_lora_adapter", "lora_name"),
            ("/unload_lora_adapter", "lora_name"),
        ]:
            assert field in (await post(client, route, 400))["message"]
        assert (await client.post("/generate", content=b"{")).status_code == 400
        assert (await client.post("/pause_generation", content=b"[]")).status_code == 400
        assert (await client.get("/nowhere")).status_code == 404


async def test_a_key_opens_all_routes_but_the_health_checks(serving: Serving) -> None:
    """Those answer without it."""
    async with serving(api_key="secret") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert await post(client, "/generate", 401, **body([5])) == {"error": "Unauthorized"}
        client.headers["Authorization"] = "Bearer secret"
        await post(client, "/generate", **body([5]))


async def test_a_body_beyond_the_limit_is_refused(serving: Serving) -> None:
    """Whether it says its length or comes in pieces; the server goes on."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b" " * 100

    async with serving(max_body_bytes=5000) as client:
        for content in (b" " * 5001, pieces()):
            response = await client.post("/generate", content=content)
            assert (response.status_code, "5000 bytes" in response.text) == (413, True)
        await post(client, "/generate", **body([5]))


async def test_the_server_says_what_it_is(serving: Serving) -> None:
    """Its version is not one of SGLang's."""
    async with serving() as client:
        info = (await client.get("/server_info")).json()
        model = (await client.get("/model_info")).json()
    assert info["version"].startswith("embedded-")
    assert info["max_total_num_tokens"] == 20_000
    assert model["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"host": "0.0.0.0"}, "--host"),
        ({"port": 65_536}, "--port"),
        ({"dtype": "int8"}, "--dtype"),
        ({"threads": 0}, "--threads"),
        ({"max_running_requests": 0}, "--max-running-requests"),
        ({"max_total_tokens": 1}, "--max-total-tokens"),
        ({"model": Path("/does/not/exist")}, "--model"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Before anything is loaded."""
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=key):
        ServerOptions(**{"model": tmp_path} | options)
