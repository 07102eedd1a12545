"""Adapters of the embedded server: versions side by side, and whom an unload waits for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.servers.embedded.calls import LONG, Call, Serving, body, post, until_running


async def test_adapters_are_versions_side_by_side(serving: Serving, tiny_adapter: Callable[..., Path]) -> None:
    """They share no KV with each other or the base, a name in use is refused, and a bad folder too."""
    one, two = str(tiny_adapter(seed=1)), str(tiny_adapter(seed=2))
    async with serving() as client:
        await post(client, "/load_lora_adapter", lora_name="v1", lora_path=one)
        reply = await post(client, "/load_lora_adapter", lora_name="v2", lora_path=two)
        assert reply["success"] and reply["loaded_adapters"] == {"v1": one, "v2": two}
        taken = await post(client, "/load_lora_adapter", 400, lora_name="v1", lora_path=two)
        assert taken["error_message"] == "Failed to load LoRA adapter v1 because it is already loaded"
        broken = await post(client, "/load_lora_adapter", 400, lora_name="v3", lora_path="/does/not/exist")
        assert broken["success"] is False and "v3" not in broken["loaded_adapters"]
        replies = [await post(client, "/generate", **body([5, 6, 7], lora_path=name)) for name in (None, "v1", "v2")]
        models = (await client.get("/v1/models")).json()["data"]
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 0, 0]
    assert len({str(reply["meta_info"]["output_token_logprobs"]) for reply in replies}) == 3
    assert {model["id"]: model["root"] for model in models if model["parent"]} == {"v1": one, "v2": two}


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("ended_by", ["abort", "disconnect"])
async def test_an_unload_waits_for_users(
    serving: Serving, tiny_adapter: Callable[..., Path], ended_by: str, paused: bool
) -> None:
    """However they end, in a pause too; the name is gone at once."""
    async with serving() as client, anyio.create_task_group() as tasks:
        await post(client, "/load_lora_adapter", lora_name="v1", lora_path=str(tiny_adapter(seed=1)))
        tasks.start_soon(call := Call(client, body([5], new=LONG, rid="r", lora_path="v1")))
        await until_running(client)
        if paused:
            await post(client, "/pause_generation", mode="retract")
        unloaded = anyio.Event()

        async def unload() -> None:
            await post(client, "/unload_lora_adapter", lora_name="v1")
            unloaded.set()

        tasks.start_soon(unload)
        while len((await client.get("/v1/models")).json()["data"]) == 2:
            await anyio.lowlevel.checkpoint()
        assert not unloaded.is_set()
        if ended_by == "abort":
            await post(client, "/abort_request", rid="r")
        else:
            call.scope.cancel()
        await unloaded.wait()
        assert (await post(client, "/unload_lora_adapter", 400, lora_name="v1"))["success"] is False


async def test_a_late_request_loads_its_adapter_again(serving: Serving, tiny_adapter: Callable[..., Path]) -> None:
    """From the path that the server remembers; each load has a cache of its own."""
    async with serving() as client:
        await post(client, "/load_lora_adapter", lora_name="v1", lora_path=str(tiny_adapter(seed=1)))
        first = await post(client, "/generate", **body([5, 6], lora_path="v1"))
        await post(client, "/unload_lora_adapter", lora_name="v1")
        late = [await post(client, "/generate", **body([5, 6], lora_path="v1")) for _ in range(2)]
        models = (await client.get("/v1/models")).json()["data"]
    assert [reply["output_ids"] for reply in late] == [first["output_ids"]] * 2
    assert [reply["meta_info"]["cached_tokens"] for reply in late] == [0, 1]
    assert [model["id"] for model in models if model["parent"]] == ["v1"]


async def test_a_name_that_is_free_again_takes_other_weights(
    serving: Serving, tiny_adapter: Callable[..., Path]
) -> None:
    """A request names the load of its time, not a path."""
    async with serving() as client:
        replies = []
        for seed in (1, 2):
            await post(client, "/load_lora_adapter", lora_name="v", lora_path=str(tiny_adapter(seed=seed)))
            replies.append(await post(client, "/generate", **body([5, 6], lora_path="v")))
            await post(client, "/unload_lora_adapter", lora_name="v")
        again = await post(client, "/generate", **body([5, 6], lora_path="v"))
    logprobs = [reply["meta_info"]["output_token_logprobs"] for reply in (*replies, again)]
    assert logprobs[0] != logprobs[1] == logprobs[2]


async def test_requests_that_load_an_adapter_again_at_once_share_it(
    serving: Serving, tiny_adapter: Callable[..., Path]
) -> None:
    """One load, so that a later unload waits for both."""
    async with serving() as client:
        await post(client, "/load_lora_adapter", lora_name="v1", lora_path=str(tiny_adapter(seed=1)))
        await post(client, "/unload_lora_adapter", lora_name="v1")
        prompt = [*range(5, 25)]
        async with anyio.create_task_group() as tasks:
            calls = [Call(client, body(prompt, lora_path="v1")) for _ in range(2)]
            for call in calls:
                tasks.start_soon(call)
        assert sorted(call.meta["cached_tokens"] for call in calls) == [0, 19]
