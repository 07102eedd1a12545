"""Pauses, weight updates and flushes of the embedded server behave as SGLang's do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.servers.embedded.calls import LONG, Call, Serving, body, load, post, until, until_progress, until_running


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_holds_running_and_new_requests(serving: Serving, mode: str) -> None:
    """Aborted ones answer at once; the others go on after it, retracted ones by computing again."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(running := Call(client, body([5], new=LONG, rid="r")))
        await until_running(client)
        await post(client, "/pause_generation", mode=mode)
        tasks.start_soon(new := Call(client, body([6])))
        held = 1 if mode == "abort" else 2
        found = await until(client, lambda found: found["num_running_reqs"] + found["num_waiting_reqs"] == held)
        assert found["num_running_reqs"] == (1 if mode == "in_place" else 0)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/flush_cache")).status_code == (400 if mode == "in_place" else 200)
        used = (await load(client))["num_used_tokens"]
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert (await load(client))["num_used_tokens"] == used
        assert new.reply is None
        await post(client, "/continue_generation")
        if mode != "abort":
            await until_running(client)
            await until_progress(client)
            assert running.reply is None
            await post(client, "/abort_request", rid="r")
    assert running.meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert len(new.reply["output_ids"]) == 4


async def test_an_unknown_pause_mode_is_refused(serving: Serving) -> None:
    """And does not pause."""
    async with serving() as client:
        assert "sideways" in (await post(client, "/pause_generation", 400, mode="sideways"))["message"]
        assert (await client.get("/ready")).status_code == 200


async def test_new_weights_change_label_path_and_tokens(serving: Serving, tiny_model: Callable[..., Path]) -> None:
    """And the prefix cache is forgotten, unless the caller keeps it."""
    path = str(tiny_model(seed=1))
    async with serving() as client:
        before = await post(client, "/generate", **body([5, 6, 7]))
        reply = await post(client, "/update_weights_from_disk", model_path=path, weight_version="1")
        assert reply["success"] and reply["message"].endswith("Weight version updated to 1.")
        info = (await client.get("/model_info")).json()
        assert (info["weight_version"], info["model_path"]) == ("1", path)
        after = await post(client, "/generate", **body([5, 6, 7]))
        await post(
            client, "/update_weights_from_disk", model_path=str(tiny_model()), weight_version="2", flush_cache=False
        )
        stale = await post(client, "/generate", **body([5, 6, 7]))
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["output_token_logprobs"] != before["meta_info"]["output_token_logprobs"]
    assert stale["meta_info"]["cached_tokens"] == 2


async def test_weights_that_do_not_fit_change_nothing(serving: Serving, tiny_model: Callable[..., Path]) -> None:
    """The label stays, and requests go on."""
    async with serving() as client:
        before = await post(client, "/generate", **body([5, 6, 7]))
        for path in ("/does/not/exist", str(tiny_model("llama"))):
            reply = await post(client, "/update_weights_from_disk", 400, model_path=path, weight_version="1")
            assert reply["success"] is False
        assert (await client.get("/model_info")).json()["weight_version"] == "default"
        after = await post(client, "/generate", **body([5, 6, 7]))
    assert after["output_ids"] == before["output_ids"]


async def test_an_update_waits_for_running_requests_and_holds_new_ones(
    serving: Serving, tiny_model: Callable[..., Path]
) -> None:
    """So that no request has tokens of two versions."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(old := Call(client, body([5], new=LONG, rid="old")))
        await until_running(client)
        updated = anyio.Event()

        async def update() -> None:
            await post(client, "/update_weights_from_disk", model_path=str(tiny_model(seed=1)), weight_version="1")
            updated.set()

        tasks.start_soon(update)
        await until_progress(client)
        tasks.start_soon(new := Call(client, body([6])))
        await until(client, lambda found: found["num_waiting_reqs"] == 1)
        await until_progress(client)
        assert not updated.is_set()
        await post(client, "/abort_request", rid="old")
    assert [span["version"] for span in old.meta["weight_versions"]] == ["default"]
    assert [span["version"] for span in new.meta["weight_versions"]] == ["1"]


async def test_an_update_can_abort_what_runs(serving: Serving, tiny_model: Callable[..., Path]) -> None:
    """Instead of waiting for it."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(old := Call(client, body([5], new=LONG)))
        await until_running(client)
        await post(client, "/update_weights_from_disk", model_path=str(tiny_model(seed=1)), abort_all_requests=True)
    assert old.meta["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("mode", "flush", "status"), [("in_place", True, 400), ("in_place", False, 200), ("retract", True, 200)]
)
async def test_an_update_in_a_pause_splits_the_spans(
    serving: Serving, tiny_model: Callable[..., Path], mode: str, flush: bool, status: int
) -> None:
    """Frozen requests forbid the flush, and then the reply is 400 although the weights are new."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(call := Call(client, body([5], new=LONG, rid="r")))
        await until_running(client)
        await post(client, "/pause_generation", mode=mode)
        update = {"model_path": str(tiny_model(seed=1)), "weight_version": "1", "flush_cache": flush}
        reply = await post(client, "/update_weights_from_disk", status, **update)
        assert reply["success"] is (status == 200)
        await post(client, "/continue_generation")
        await until_running(client)
        await until_progress(client)
        await post(client, "/abort_request", rid="r")
    old, new = call.meta["weight_versions"]
    assert (old["version"], new["version"]) == ("default", "1")
    assert 0 == old["start"] < old["end"] == new["start"] < new["end"] == len(call.reply["output_ids"])
    assert call.meta["weight_version"] == "1"


async def test_a_label_can_be_changed_alone(serving: Serving) -> None:
    """Aborting everything is the default, and can be declined."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(call := Call(client, body([5], new=LONG)))
        await until_running(client)
        await until_progress(client)
        await post(client, "/update_weight_version", new_version="x", abort_all_requests=False)
        await until_progress(client)
        reply = await post(client, "/update_weight_version", new_version="y")
    assert reply == {"success": True, "message": "Weight version updated to y", "new_version": "y"}
    assert call.meta["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in call.meta["weight_versions"]] == ["default", "x"]


async def test_a_flush_is_refused_while_something_runs(serving: Serving) -> None:
    """Idle, it empties the pool."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(Call(client, body([5], new=LONG)))
        await until_running(client)
        assert "Flush cache failed." in await post(client, "/flush_cache", 400)
        await post(client, "/abort_request", abort_all=True)
        await until(client, lambda found: found["num_running_reqs"] == 0)
        assert "Cache flushed." in await post(client, "/flush_cache")
        assert (await load(client))["num_used_tokens"] == 0
