"""LoRA adapters: loaded, used, unloaded, and what comes back."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from tests.conformance.subject import LONG, Subject, outputs
from tests.tinymodels import CLOSE

PROMPT = [5, 9, 17, 33, 8, 40, 12]


async def _sampled_by(subject: Subject, name: str | None, adapter: int | None) -> int:
    """The cached tokens of a request of ``name``, whose log-probabilities are those of ``adapter``."""
    reply = await subject.generate(PROMPT, lora_path=name)
    expected = subject.logprobs([*PROMPT, *reply["output_ids"]], len(PROMPT), adapter=adapter)
    np.testing.assert_allclose(outputs(reply), expected, atol=CLOSE)
    assert reply["meta_info"]["weight_version"] == "default"
    return int(reply["meta_info"]["cached_tokens"])


async def test_requests_name_their_adapter(subject: Subject) -> None:
    """Each has its own weights and its own cache; no label tells of it."""
    await subject.load("one", 0)
    await subject.load("two", 1)
    for name, adapter in ((None, None), ("one", 0), ("two", 1)):
        assert await _sampled_by(subject, name, adapter) == 0
        assert await _sampled_by(subject, name, adapter) == len(PROMPT) - 1


async def test_requests_of_several_adapters_run_together(subject: Subject) -> None:
    """In one batch."""
    await subject.load("one", 0)
    await subject.load("two", 1)
    pairs: list[tuple[str | None, int | None]] = [(None, None), ("one", 0), ("two", 1)] * 3
    async with anyio.create_task_group() as tasks:
        for name, adapter in pairs:
            tasks.start_soon(_sampled_by, subject, name, adapter)


async def test_loading_and_unloading_say_what_is_loaded(subject: Subject) -> None:
    """So do the models."""
    path = str(subject.served.adapters[0])
    reply = await subject.post("/load_lora_adapter", {"lora_name": "one", "lora_path": path})
    assert (reply["success"], reply["error_message"], reply["loaded_adapters"]) == (True, "", {"one": path})
    assert await subject.adapters() == {"one": path}
    reply = await subject.post("/unload_lora_adapter", {"lora_name": "one"})
    assert (reply["success"], reply["loaded_adapters"]) == (True, {})
    assert await subject.adapters() == {}


async def test_a_name_in_use_a_bad_path_and_an_unknown_name_are_refused(subject: Subject) -> None:
    """With the reason, and what is loaded stays."""
    await subject.load("one")
    again = {"lora_name": "one", "lora_path": str(subject.served.adapters[1])}
    reply = await subject.post("/load_lora_adapter", again, status=400)
    assert reply["error_message"] == "Failed to load LoRA adapter one because it is already loaded"
    absent = {"lora_name": "bad", "lora_path": "/does/not/exist"}
    assert (await subject.post("/load_lora_adapter", absent, status=400))["success"] is False
    reply = await subject.post("/unload_lora_adapter", {"lora_name": "none"}, status=400)
    assert reply["error_message"].startswith("LoRA with name none does not exist.")
    assert list(await subject.adapters()) == ["one"]
    assert (await subject.post("/load_lora_adapter", {"lora_name": "x"}, status=400))["object"] == "error"


async def test_an_adapter_that_was_never_loaded_is_an_error_of_the_request(subject: Subject) -> None:
    """The message is how a client learns that a server was started anew."""
    refusal = await subject.generate(lora_path="never", status=400)
    assert refusal["error"]["message"].startswith("Got LoRA adapter that has never been loaded: never\n")


async def test_a_late_request_brings_its_adapter_back(subject: Subject) -> None:
    """From the path that it was loaded from, which therefore must not change."""
    await subject.load("one")
    await _sampled_by(subject, "one", 0)
    await subject.post("/unload_lora_adapter", {"lora_name": "one"})
    assert await _sampled_by(subject, "one", 0) == 0
    assert list(await subject.adapters()) == ["one"]


async def test_a_name_that_is_free_again_takes_other_weights(subject: Subject) -> None:
    """And has nothing of the old one's cache."""
    await subject.load("one", 0)
    await _sampled_by(subject, "one", 0)
    await subject.post("/unload_lora_adapter", {"lora_name": "one"})
    await subject.load("one", 1)
    assert await _sampled_by(subject, "one", 1) == 0


@pytest.mark.slow
async def test_an_unload_waits_for_its_users_and_everybody_else_for_it(subject: Subject) -> None:
    """The name is gone at once; loads of other adapters wait too."""
    await subject.load("one")
    done: list[str] = []

    async def unload() -> None:
        await subject.post("/unload_lora_adapter", {"lora_name": "one"})
        done.append("unload")

    async def load() -> None:
        await subject.load("two", 1)
        done.append("load")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="user", lora_path="one", new=LONG))
        await subject.until_tokens()
        tasks.start_soon(unload)
        await subject.until_adapters(0)
        tasks.start_soon(load)
        await anyio.sleep(0.2)
        assert done == [] and not call.done.is_set()
        await subject.generate()
        await subject.post("/abort_request", {"rid": "user"})
    assert sorted(done) == ["load", "unload"]
    assert list(await subject.adapters()) == ["two"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_adapters_are_loaded_in_a_pause_too(subject: Subject, mode: str) -> None:
    """Nothing has to run for it, nor to stop."""
    async with subject.paused(mode):
        await subject.load("one")
    await _sampled_by(subject, "one", 0)


async def test_an_adapter_comes_as_tensors_in_the_body(subject: Subject) -> None:
    """And cannot come back when it was unloaded."""
    if await subject.differs():
        return
    from safetensors import safe_open

    from asyncrl.publishing.torch_buckets import as_tensors, make_bucket, payload

    folder = subject.served.adapters[0]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}
    config |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    if subject.kind == "scripted":
        tensors = subject.served.tensors(folder)
    else:
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    bucket = make_bucket(as_tensors(tensors), list(tensors))
    content = {"lora_name": "sent", "config_dict": config, "load_format": "flattened_bucket"}
    pieces = {"serialized_named_tensors": [payload(bucket, by_handle=False)]}
    reply = await subject.post("/load_lora_adapter_from_tensors", content | pieces)
    assert reply["loaded_adapters"] == {"sent": "__tensor__"}
    await _sampled_by(subject, "sent", 0)
    await subject.post("/unload_lora_adapter", {"lora_name": "sent"})
    await subject.generate(lora_path="sent", status=400)
