"""New weights: from disk, as tensors, by broadcast; and which tokens are of which."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from tests.conformance.subject import LONG, Subject, outputs
from tests.tinymodels import CLOSE

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 17, 33, 8, 40, 12]
ABSENT = "/does/not/exist"


async def _holds(subject: Subject, weights: int, label: str) -> None:
    """The weights are those, and called so."""
    reply = await subject.generate(PROMPT)
    expected = subject.logprobs([*PROMPT, *reply["output_ids"]], len(PROMPT), weights=weights)
    np.testing.assert_allclose(outputs(reply), expected, atol=CLOSE)
    assert reply["meta_info"]["weight_version"] == label
    assert await subject.label() == label


async def test_an_update_from_disk_changes_weights_label_and_path(subject: Subject) -> None:
    """And the prefix cache is forgotten."""
    await _holds(subject, 0, "default")
    reply = await subject.update("v1")
    assert reply["success"] is True and reply["message"].endswith("Weight version updated to v1.")
    info = await subject.get("/model_info")
    assert info["model_path"] == info["served_model_name"] == str(subject.served.weights[1])
    again = await subject.generate(PROMPT)
    assert again["meta_info"]["cached_tokens"] == 0
    await _holds(subject, 1, "v1")


async def test_an_update_without_a_label_keeps_the_old_one(subject: Subject) -> None:
    """Which is why we always send one."""
    await subject.update(None)
    await _holds(subject, 1, "default")


async def test_an_update_that_fails_changes_nothing(subject: Subject) -> None:
    """Neither weights nor label."""
    content = {"model_path": ABSENT, "weight_version": "bad"}
    reply = await subject.post("/update_weights_from_disk", content, status=400)
    assert reply["success"] is False and reply["message"]
    await _holds(subject, 0, "default")


@pytest.mark.parametrize("content", [{}, {"model_path": ABSENT, "weight_version": 5}])
async def test_bodies_of_updates_are_checked(subject: Subject, content: Mapping[str, Any]) -> None:
    """The path must be there, and a label is a text."""
    assert (await subject.post("/update_weights_from_disk", content, status=400))["object"] == "error"


async def test_without_a_flush_old_prefixes_serve_new_weights(subject: Subject) -> None:
    """The trap that cache namespaces are for."""
    await subject.generate(PROMPT)
    await subject.update("v1", flush_cache=False)
    stale = await subject.generate(PROMPT)
    assert stale["meta_info"]["cached_tokens"] == len(PROMPT) - 1
    fresh = await subject.generate(PROMPT, extra_key="v1")
    assert fresh["meta_info"]["cached_tokens"] == 0
    expected = subject.logprobs([*PROMPT, *fresh["output_ids"]], len(PROMPT), weights=1)
    np.testing.assert_allclose(outputs(fresh), expected, atol=CLOSE)


async def test_an_update_waits_for_what_runs_and_holds_what_comes(subject: Subject) -> None:
    """Without a pause no request has tokens of two versions."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(old := subject.call(rid="old", new=LONG))
        await subject.until_tokens()
        updated = anyio.Event()

        async def update() -> None:
            # Not with a flush: SGLang answers an aborted request one step before it is gone.
            await subject.update("v1", flush_cache=False)
            updated.set()

        tasks.start_soon(update)
        await anyio.sleep(0.1)
        tasks.start_soon(new := subject.call())
        with anyio.move_on_after(0.2):
            await new.done.wait()
        assert not updated.is_set() and not new.done.is_set()
        await subject.post("/abort_request", {"rid": "old"})
    assert [span["version"] for span in old.meta["weight_versions"]] == ["default"]
    assert [span["version"] for span in new.meta["weight_versions"]] == ["v1"]


async def test_an_update_that_waits_goes_on_waiting_through_a_pause(subject: Subject) -> None:
    """What it waits for was decided when it came."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(old := subject.call(rid="old", new=LONG))
        await subject.until_tokens()
        tasks.start_soon(partial(subject.update, "v1", flush_cache=False))
        await anyio.sleep(0.1)
        async with subject.paused("retract"):
            await anyio.sleep(0.1)
            assert await subject.label() == "default"
        await subject.until_running()
        await subject.post("/abort_request", {"rid": "old"})
    assert [span["version"] for span in old.meta["weight_versions"]] == ["default"]
    assert await subject.label() == "v1"


async def test_an_update_can_abort_what_runs(subject: Subject) -> None:
    """Instead of waiting for it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(old := subject.call(new=LONG))
        await subject.until_tokens()
        # The cache cannot be flushed before the abort has arrived everywhere.
        await subject.update("v1", abort_all_requests=True, flush_cache=False)
    assert old.meta["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in old.meta["weight_versions"]] == ["default"]


@pytest.mark.parametrize(("mode", "flush"), [("retract", True), ("retract", False), ("in_place", False)])
async def test_a_request_that_crosses_an_update_has_two_spans(subject: Subject, mode: str, flush: bool) -> None:
    """One for each version; tokens keep the log-probabilities that they were sampled with."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(PROMPT, rid="r", new=LONG))
        await subject.until_tokens()
        async with subject.paused(mode):
            await subject.update("v1", flush_cache=flush)
        await subject.until_tokens()
        await subject.post("/abort_request", {"rid": "r"})
    logprobs = outputs(call.reply)
    first, second = call.meta["weight_versions"]
    assert (first["version"], second["version"]) == ("default", "v1")
    assert 0 < first["end"] < len(logprobs)
    ids = [*PROMPT, *call.reply["output_ids"]]
    old = subject.logprobs(ids, len(PROMPT))[: first["end"]]
    np.testing.assert_allclose(logprobs[: first["end"]], old, atol=CLOSE)
    if mode == "retract" and flush:
        # The new weights have computed the whole context anew.
        new = subject.logprobs(ids, len(PROMPT), weights=1)[first["end"] :]
        np.testing.assert_allclose(logprobs[first["end"] :], new, atol=CLOSE)


async def test_an_update_that_cannot_flush_is_refused_and_has_happened(subject: Subject) -> None:
    """Frozen requests keep their cache, so that the reply is 400; only requests tell the new label then."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="r", new=LONG))
        await subject.until_tokens()
        async with subject.paused("in_place"):
            reply = await subject.update("v1", status=400)
        assert reply["success"] is False and reply["message"].startswith("Weights were updated, but")
        assert await subject.label() == "default"
        await subject.until_tokens()
        await subject.post("/abort_request", {"rid": "r"})
    outputs(call.reply)
    assert [span["version"] for span in call.meta["weight_versions"]] == ["default", "v1"]
    content = {"new_version": "v1", "abort_all_requests": False}
    await subject.post("/update_weight_version", content)
    assert await subject.label() == "v1"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_without_tokens_is_of_the_new_version_alone(subject: Subject, mode: str) -> None:
    """It was sent before the update, and waited."""
    async with anyio.create_task_group() as tasks, subject.paused(mode):
        tasks.start_soon(call := subject.call(PROMPT))
        await anyio.sleep(0.1)
        await subject.update("v1", flush_cache=False)
    outputs(call.reply)
    assert [span["version"] for span in call.meta["weight_versions"]] == ["v1"]


async def test_a_label_can_be_changed_alone(subject: Subject) -> None:
    """It aborts everything, unless that is declined."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(new=LONG))
        await subject.until_tokens()
        content = {"new_version": "x", "abort_all_requests": False}
        reply = await subject.post("/update_weight_version", content)
        assert reply == {"success": True, "message": "Weight version updated to x", "new_version": "x"}
        await subject.until_tokens()
        assert not call.done.is_set()
        await subject.post("/update_weight_version", {"new_version": "y"})
        await call.done.wait()
    assert [span["version"] for span in call.meta["weight_versions"]][:2] == ["default", "x"]
    assert call.meta["finish_reason"]["type"] == "abort"
    assert await subject.label() == "y"


async def test_pieces_come_within_a_session_only(subject: Subject) -> None:
    """Tensors and broadcasts need one; there is one at a time."""
    pieces: dict[str, dict[str, Any]] = {
        "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"]},
        "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
    }
    for route, content in pieces.items():
        reply = await subject.post(route, content, status=400)
        what = route.removeprefix("/")
        assert reply["message"] == f"{what} must run between begin_weight_update() and end_weight_update()"
    assert "no weight-update session is open" in (await subject.post("/end_weight_update", status=400))["message"]
    assert await subject.post("/begin_weight_update") == {"success": True, "message": "Success"}
    assert "already open" in (await subject.post("/begin_weight_update", status=400))["message"]
    await subject.generate()
    await subject.post("/end_weight_update")


async def test_a_session_waits_for_what_runs(subject: Subject) -> None:
    """Without a pause, like an update."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="r", new=LONG))
        await subject.until_tokens()
        begun = anyio.Event()

        async def begin() -> None:
            await subject.post("/begin_weight_update")
            begun.set()

        tasks.start_soon(begin)
        with anyio.move_on_after(0.2):
            await begun.wait()
        assert not begun.is_set() and not call.done.is_set()
        await subject.post("/abort_request", {"rid": "r"})
    await subject.post("/end_weight_update")


async def test_weights_come_as_tensors_in_the_body(subject: Subject) -> None:
    """In one bucket, by value."""
    if await subject.differs():
        return
    from asyncrl.publishing.torch_buckets import as_tensors, make_bucket, payload

    tensors = as_tensors(subject.served.tensors(subject.served.weights[1]))
    bucket = make_bucket(tensors, list(tensors))
    content = {"serialized_named_tensors": [payload(bucket, by_handle=False)], "load_format": "flattened_bucket"}
    await subject.post("/begin_weight_update")
    reply = await subject.post("/update_weights_from_tensor", content | {"weight_version": "t1"})
    await subject.post("/end_weight_update")
    assert reply["message"].endswith("Weight version updated to t1.")
    await _holds(subject, 1, "t1")


async def test_weights_come_by_broadcast(subject: Subject) -> None:
    """Through a group of the trainer's and the server's, two buckets one after the other."""
    if await subject.differs():
        return
    from asyncrl.publishing.torch_buckets import as_tensors, make_bucket
    from asyncrl.publishing.torch_group import TorchGroup

    tensors = as_tensors(subject.served.tensors(subject.served.weights[1]))
    listener = socket.create_server(("127.0.0.1", 0))
    name, port = f"conformance-{subject.kind}", listener.getsockname()[1]
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    trainer = TorchGroup(listener, name=name, backend="gloo", world_size=2, timeout_s=20)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(subject.post, "/init_weights_update_group", group | {"group_name": name, "backend": "gloo"})
        await anyio.to_thread.run_sync(trainer.join)
    await subject.post("/begin_weight_update")
    names = list(tensors)
    for label, part in (("b0", names[::2]), ("b1", names[1::2])):
        bucket = make_bucket(tensors, part)
        content: dict[str, Any] = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes}
        content |= {"group_name": name, "load_format": "flattened_bucket", "weight_version": label}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(subject.post, "/update_weights_from_distributed", content)
            await anyio.to_thread.run_sync(trainer.broadcast, bucket.flat)
    await subject.post("/end_weight_update")
    await _holds(subject, 1, "b1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(subject.post, "/destroy_weights_update_group", {"group_name": name})
        await anyio.to_thread.run_sync(trainer.close)


async def test_a_group_must_exist(subject: Subject) -> None:
    """To be used, and to be destroyed."""
    await subject.post("/begin_weight_update")
    content = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
    reply = await subject.post("/update_weights_from_distributed", content, status=400)
    assert "Group none not in []" in reply["message"]
    await subject.post("/end_weight_update")
    reply = await subject.post("/destroy_weights_update_group", {"group_name": "none"}, status=400)
    assert reply == {"success": False, "message": "The group to be destroyed does not exist."}


async def test_checksums_are_those_of_the_weights(subject: Subject) -> None:
    """They change with them, and are the same again when the weights are."""
    sums = []
    for weights in (0, 1, 0):
        await subject.update(f"v{weights}", weights)
        reply = await subject.post("/weights_checker", {"action": "checksum"})
        assert reply["success"] is True and reply["ranks"][0]["checksums"]
        sums.append(reply["per_engine_checksum"])
    assert sums[0] == sums[2] != sums[1]
    refusal = await subject.post("/weights_checker", {"action": "nothing"}, status=400)
    assert refusal == {"success": False, "message": "Unsupported action='nothing'"}
