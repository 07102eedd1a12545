"""Requests to the embedded server: what they get, what is refused, and how they end early."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import orjson
import pytest

from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.wire import generate_body, parse_segment
from asyncrl.types import StopReason
from tests.servers.embedded.calls import LONG, Call, Serving, body, load, post, until, until_running

PLAIN = [11, 6, 7]
# The seven tokens after it, with the seed of ``body``, are different letters and digits.


async def test_a_request_gets_ids_logprobs_text_and_version(serving: Serving) -> None:
    """And a repetition reuses the prompt's KV."""
    async with serving() as client:
        reply = await post(client, "/generate", **body(PLAIN, rid="r1"))
        again = await post(client, "/generate", **body(PLAIN))
    meta = reply["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("r1", 3, 4, 0)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
    assert meta["input_token_logprobs"] == []
    assert len(reply["text"]) == 4
    assert again["output_ids"] == reply["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 2


async def test_the_client_understands_the_server(serving: Serving) -> None:
    """Body and reply of the wire module pass through it."""
    request = SegmentRequest(
        trajectory_id="t", input_ids=np.array([5, 6], dtype=np.int32), max_new_tokens=3, version=2, temperature=0.7
    )
    async with serving() as client:
        await post(client, "/update_weight_version", new_version="2")
        content = generate_body(request, rid="r") | {"input_ids": [5, 6]}
        segment = parse_segment(await post(client, "/generate", **content), request=request)
    assert len(segment.tokens) == 3
    assert [span.version for span in segment.versions] == [2]


@pytest.mark.parametrize("new", [0, 1])
async def test_a_prompt_is_scored(serving: Serving, new: int) -> None:
    """As the probe after a publication asks for it; the first entry is always null."""
    prompt = [5, 6, 7, 8]
    async with serving() as client:
        reply = await post(client, "/generate", **body(prompt, new=new, logprob_start_len=1))
        await post(client, "/generate", 400, **body(prompt, new=new, logprob_start_len=5))
        at_the_end = await post(client, "/generate", **body(prompt, new=1, logprob_start_len=4))
    entries = reply["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == prompt[1:]
    assert entries[0][0] is None and all(entry[0] < 0 for entry in entries[1:])
    assert len(reply["output_ids"]) == new
    assert at_the_end["meta_info"]["input_token_logprobs"] == []


@pytest.mark.parametrize("by", ["string", "token"])
async def test_what_stopped_is_cut_from_the_text_unless_kept(serving: Serving, by: str) -> None:
    """The ids always have it."""
    async with serving() as client:
        free = await post(client, "/generate", **body(PLAIN, new=7))
        stop: dict[str, list[Any]]
        stop = {"stop": ["?", free["text"][2:4]]} if by == "string" else {"stop_token_ids": [free["output_ids"][3]]}
        replies = []
        for no_trim in (False, True):
            sampling = {"max_new_tokens": 7, "sampling_seed": 1, "no_stop_trim": no_trim, **stop}
            replies.append(await post(client, "/generate", **body(PLAIN) | {"sampling_params": sampling}))
    assert [reply["output_ids"] for reply in replies] == [free["output_ids"][:4]] * 2
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["stop"] * 2
    assert [reply["text"] for reply in replies] == [free["text"][: 2 if by == "string" else 3], free["text"][:4]]


async def test_the_end_of_sequence_id_of_the_model_stops(serving: Serving) -> None:
    """Unless ``ignore_eos``, which ignores ``stop_token_ids`` as well."""
    async with serving() as client:
        sampling: dict[str, Any] = {"max_new_tokens": 2000, "sampling_seed": 18}
        stopped = await post(client, "/generate", **body([5]) | {"sampling_params": sampling})
        length = len(stopped["output_ids"])
        sampling |= {"ignore_eos": True, "max_new_tokens": length + 5, "stop_token_ids": [1]}
        ignored = await post(client, "/generate", **body([5]) | {"sampling_params": sampling})
    assert stopped["output_ids"][-1] == 1
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    assert ignored["output_ids"][:length] == stopped["output_ids"]
    assert ignored["meta_info"]["finish_reason"] == {"type": "length", "length": length + 5}


async def test_requests_that_cannot_be_served_are_refused_by_name(serving: Serving) -> None:
    """Ids outside of the vocabulary too, which end the real server."""
    async with serving(context_length=100, max_total_tokens=60) as client:
        cases = [
            (body([64]), "vocabulary of 64"),
            (body([-1]), "vocabulary of 64"),
            (body([5] * 100), "The input (100 tokens) is longer than the model's context length (100 tokens)."),
            (body([5] * 50, new=51), "maximum context length"),
            (body([5] * 60, new=1), "exceeds the maximum allowed length"),
            (body([5], lora_path="nope"), "never been loaded: nope"),
        ]
        for content, message in cases:
            assert message in (await post(client, "/generate", 400, **content))["error"]["message"]
        # What does not fit into the pool is cut, as in SGLang.
        reply = await post(client, "/generate", **body([5] * 50, new=50))
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


async def test_a_rid_in_use_is_refused(serving: Serving) -> None:
    """Until its request has ended."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(call := Call(client, body([5], new=LONG, rid="r")))
        await until_running(client)
        error = await post(client, "/generate", 400, **body([6], rid="r"))
        assert error["error"]["message"] == "Duplicate request ID detected: r"
        await post(client, "/abort_request", rid="r")
    assert call.meta["finish_reason"]["type"] == "abort"


async def test_an_aborted_request_answers_with_what_it_has(serving: Serving) -> None:
    """With status 200; queued ones too, and an unknown rid or a prefix does nothing."""
    async with serving(max_running_requests=1) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(running := Call(client, body([5], new=LONG, rid="running")))
        await until_running(client)
        tasks.start_soon(queued := Call(client, body([6], rid="queued")))
        await until(client, lambda found: found["num_waiting_reqs"] == 1)
        await post(client, "/abort_request", rid="run")
        assert (await load(client))["num_running_reqs"] == 1
        await post(client, "/abort_request", abort_all=True)
    assert running.meta["finish_reason"]["message"] == "Aborted"
    assert len(running.reply["output_ids"]) == len(running.meta["output_token_logprobs"]) > 0
    assert queued.meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert queued.reply["output_ids"] == []
    request = SegmentRequest(trajectory_id="", input_ids=np.array([6], dtype=np.int32), max_new_tokens=4, version=0)
    assert parse_segment(queued.reply, request=request).stop is StopReason.ABORT


async def test_a_client_that_goes_away_frees_its_place(serving: Serving) -> None:
    """Its request is aborted, and the next one runs."""
    async with serving(max_running_requests=1) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(call := Call(client, body([5], new=LONG)))
        await until_running(client)
        call.scope.cancel()
        await post(client, "/generate", **body([6]))
        assert (await load(client))["num_running_reqs"] == 0


async def test_a_closed_connection_aborts_its_request(serving: Serving) -> None:
    """As an HTTP server reports it: by a message, for it does not end the handler."""
    async with serving(max_running_requests=1) as client, anyio.create_task_group() as tasks:
        app = client._transport.app  # type: ignore[attr-defined]
        closed = anyio.Event()
        content = orjson.dumps(body([5], new=LONG))
        incoming = [{"type": "http.request", "body": content, "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await closed.wait()
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            pass

        tasks.start_soon(app, scope, receive, send)
        await until_running(client)
        closed.set()
        await until_running(client, 0)


async def test_a_client_that_goes_away_in_a_pause_is_forgotten(serving: Serving) -> None:
    """Whether its request is frozen or new: nothing of it runs after the pause, and its rid is free."""
    async with serving() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(running := Call(client, body([5], new=LONG, rid="running")))
        await until_running(client)
        await post(client, "/pause_generation", mode="in_place")
        tasks.start_soon(new := Call(client, body([6], new=LONG, rid="new")))
        await until(client, lambda found: found["num_waiting_reqs"] == 1)
        running.scope.cancel()
        new.scope.cancel()
        await until(client, lambda found: found["num_running_reqs"] == found["num_waiting_reqs"] == 0)
        assert "Cache flushed." in await post(client, "/flush_cache")
        assert (await load(client))["num_used_tokens"] == 0
        await post(client, "/continue_generation")
        for rid in ("running", "new"):
            await post(client, "/generate", **body([5], rid=rid))
