"""Ending requests from outside."""

from __future__ import annotations

import anyio
import pytest

from tests.conformance.subject import CONTEXT, LONG, Subject, outputs

pytestmark = pytest.mark.slow

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize("everything", [True, False])
async def test_a_running_request_keeps_what_it_has(subject: Subject, everything: bool) -> None:
    """Status 200, with ids and log-probabilities; a second abort is nothing."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="a-1", new=LONG))
        await subject.until_tokens()
        for _ in range(2):
            assert await subject.post("/abort_request", {"abort_all": True} if everything else {"rid": "a-1"}) == ""
    assert call.meta["finish_reason"] == ABORTED
    assert 0 < len(outputs(call.reply)) < LONG
    await subject.until_running(0, waiting=0)


async def test_a_prefix_of_a_rid_aborts_nothing(subject: Subject) -> None:
    """Nor does an unknown rid, or none; each is answered with 200."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="prefix-1", new=300))
        await subject.until_tokens()
        for content in ({"rid": "prefix-"}, {"rid": "unknown"}, {"rid": ""}, {}):
            await subject.post("/abort_request", content)
    assert call.meta["finish_reason"] == {"type": "length", "length": 300}


async def test_a_rid_is_a_text(subject: Subject) -> None:
    """Anything else is refused."""
    assert (await subject.post("/abort_request", {"rid": 5}, status=400))["object"] == "error"


async def test_a_request_in_the_queue_has_no_tokens_and_says_nothing_of_its_prompt(subject: Subject) -> None:
    """The other shape of an abort: without status_code, prompt_tokens and cached_tokens."""
    running = subject.served.max_running_requests
    async with anyio.create_task_group() as tasks:
        for _ in range(running):
            tasks.start_soon(subject.call(new=LONG))
        await subject.until_running(running)
        tasks.start_soon(call := subject.call(rid="queued"))
        await subject.until_running(running, waiting=1)
        await subject.post("/abort_request", {"rid": "queued"})
        await call.done.wait()
        await subject.post("/abort_request", {"abort_all": True})
    assert call.meta["finish_reason"] == ABORTED_WAITING
    assert outputs(call.reply) == []
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(call.meta)


async def test_a_request_that_is_aborted_early_ends_in_one_of_the_two_ways(subject: Subject) -> None:
    """Before its prompt is computed, while it is, or after."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call([7] * (CONTEXT - 600), rid="early", new=500))
        while not call.done.is_set():
            await subject.post("/abort_request", {"abort_all": True})
    assert call.meta["finish_reason"] in (ABORTED, ABORTED_WAITING)
    outputs(call.reply)


async def test_a_rid_that_is_live_cannot_be_used_again(subject: Subject) -> None:
    """Once its request has ended it can."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(subject.call(rid="twice", new=LONG))
        await subject.until_running()
        refusal = await subject.generate(rid="twice", status=400)
        assert refusal == {"error": {"message": "Duplicate request ID detected: twice"}}
        await subject.post("/abort_request", {"rid": "twice"})
    await subject.generate(rid="twice")


async def test_a_retracted_request_keeps_what_it_has(subject: Subject) -> None:
    """It waits, so that its abort has the shape of the queue; a server may have lost the newest of its tokens."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="back", new=LONG))
        await subject.until_tokens()
        async with subject.paused("retract"):
            await subject.post("/abort_request", {"rid": "back"})
            await call.done.wait()
    assert call.meta["finish_reason"] == ABORTED_WAITING
    outputs(call.reply)


async def test_a_frozen_request_is_aborted_after_the_pause(subject: Subject) -> None:
    """Its abort is kept until it would go on."""
    if await subject.differs():
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="frozen", new=LONG))
        await subject.until_tokens()
        async with subject.paused("in_place"):
            await subject.post("/abort_request", {"rid": "frozen"})
            with anyio.move_on_after(0.2):
                await call.done.wait()
            assert not call.done.is_set()
    assert call.meta["finish_reason"] == ABORTED
    assert 0 < len(outputs(call.reply)) < LONG


async def test_a_request_at_the_gate_cannot_be_aborted(subject: Subject) -> None:
    """Sent during a pause, it runs to its end after it; an abort is not only lost, later ones are ignored too."""
    if await subject.differs():
        return
    async with anyio.create_task_group() as tasks:
        async with subject.paused("retract"):
            tasks.start_soon(call := subject.call(rid="gate", new=300))
            # Nothing shows a request at the gate.
            await anyio.sleep(0.2)
            await subject.post("/abort_request", {"rid": "gate"})
            await subject.post("/abort_request", {"abort_all": True})
        await subject.until_running()
        await subject.post("/abort_request", {"rid": "gate"})
    assert call.meta["finish_reason"] == {"type": "length", "length": 300}
