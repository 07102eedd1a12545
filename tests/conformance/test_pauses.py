"""Pauses, in each of the three modes."""

from __future__ import annotations

import anyio
import pytest

from tests.conformance.subject import LONG, Subject, outputs

pytestmark = pytest.mark.slow

MODES = ["abort", "retract", "in_place"]
HELD_S = 0.2
# Long enough for an answer, if there were one.


@pytest.mark.parametrize("mode", MODES)
async def test_a_pause_holds_what_runs_and_what_comes(subject: Subject, mode: str) -> None:
    """Aborted requests answer, others go on afterwards, retracted ones by computing again."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running := subject.call(rid="r", new=400))
        await subject.until_tokens()
        async with subject.paused(mode):
            tasks.start_soon(new := subject.call(rid="n"))
            if mode == "abort":
                await running.done.wait()
            with anyio.move_on_after(HELD_S):
                await (new if mode == "abort" else running).done.wait()
            assert running.done.is_set() == (mode == "abort")
            assert not new.done.is_set()
            flushed = await subject.post("/flush_cache", status=400 if mode == "in_place" else 200)
            assert flushed.startswith("Flush cache failed." if mode == "in_place" else "Cache flushed.")
    kept = len(outputs(running.reply))
    if mode == "abort":
        assert running.meta["finish_reason"]["message"] == "Aborted"
        assert 0 < kept < 400
    else:
        assert running.meta["finish_reason"] == {"type": "length", "length": 400}
    assert running.meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert len(outputs(new.reply)) == 4


@pytest.mark.parametrize("mode", MODES)
async def test_a_paused_server_is_not_ready(subject: Subject, mode: str) -> None:
    """And it is again when it goes on."""
    await subject.get("/ready")
    async with subject.paused(mode):
        await subject.get("/ready", status=503)
    await subject.get("/ready")


async def test_pauses_are_not_counted(subject: Subject) -> None:
    """One continue ends two pauses, also of different modes; one without a pause is nothing."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="r", new=LONG))
        await subject.until_tokens()
        await subject.post("/pause_generation", {"mode": "in_place"})
        await subject.post("/pause_generation", {"mode": "retract"})
        done = await subject.post("/continue_generation")
        assert done == {"message": "Generation continued successfully.", "status": "ok"}
        await subject.post("/continue_generation")
        await subject.until_tokens()
        await subject.post("/abort_request", {"rid": "r"})
    assert call.meta["num_retractions"] == 1
    await subject.generate()


async def test_abort_is_the_mode_that_nobody_named(subject: Subject) -> None:
    """A body without a mode aborts."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(new=LONG))
        await subject.until_tokens()
        done = await subject.post("/pause_generation")
        await call.done.wait()
        await subject.post("/continue_generation")
    assert done == {"message": "Generation paused successfully.", "status": "ok"}
    assert call.meta["finish_reason"]["type"] == "abort"


async def test_an_unknown_mode_is_refused_and_does_not_pause(subject: Subject) -> None:
    """The server goes on."""
    assert (await subject.post("/pause_generation", {"mode": "sideways"}, status=400))["object"] == "error"
    await subject.get("/ready")


async def test_bodies_are_checked_before_they_wait(subject: Subject) -> None:
    """A request that cannot be read is refused in a pause too."""
    async with subject.paused("retract"):
        await subject.generate(sampling={"max_tokens": 5}, status=400)
