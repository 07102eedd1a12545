"""The driver's side of the connection, against scripted ranks in this process."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import numpy as np
import pytest

from asyncrl.errors import ConfigError, LearnerError, NonFiniteError
from asyncrl.learning.base import ChunkResult
from asyncrl.learning.losses import CISPO
from asyncrl.learning.ranks.client import Connection, RanksHost
from asyncrl.learning.ranks.frames import Frame
from tests.learning.ranks.fakeranks import OPTIONS, Answer, FakeRanks, answered, opened, sequence

RESULT = ChunkResult(
    tokens=2, sums={"loss": 1.5}, log_ratios=np.array([0.5, -0.5], np.float32), input_tokens=3, computed_tokens=3
)


def _says(*frames: Frame) -> Answer:
    async def answer(connection: Connection, arguments: dict[str, Any]) -> None:
        for frame in frames:
            await connection.send(frame)

    return answer


async def _silence(connection: Connection, arguments: dict[str, Any]) -> None:
    await anyio.sleep_forever()


async def _end(connection: Connection, arguments: dict[str, Any]) -> None:
    await connection.aclose()


async def _half(connection: Connection, arguments: dict[str, Any]) -> None:
    await connection._stream.send(Frame(header={"result": "x" * 100}).encoded()[:40])
    await connection.aclose()


async def test_calls_and_their_results_pass() -> None:
    """In order, with sequences, losses and arrays."""
    async with opened(answered(RESULT), answered(np.array([1.0], np.float32)), answered(None)) as (host, ranks):
        result = await host.call("forward_backward", sequences=[sequence(1, 2, 3)], loss=CISPO(eps_max=3.0), updates=1)
        assert (result.tokens, result.sums) == (2, {"loss": 1.5})
        np.testing.assert_array_equal(result.log_ratios, RESULT.log_ratios)
        np.testing.assert_array_equal(await host.call("logprobs"), [1.0])
        await host.close()
        assert [method for method, _ in ranks.heard] == ["open", "forward_backward", "logprobs", "close"]
        assert ranks.heard[0][1]["options"] == OPTIONS
        assert ranks.heard[1][1]["loss"] == CISPO(eps_max=3.0)
        with pytest.raises(LearnerError, match="not open"):
            await host.call("logprobs")


async def test_prepared_sequences_are_sent_once() -> None:
    """Later passes name them by number, until the step ends."""
    async with opened(*[answered(None)] * 6) as (host, ranks):
        one, two = sequence(1, 2), sequence(3, 4, 5)
        await host.call("prepare_step", sequences=[one, two])
        await host.call("forward_backward", sequences=[two])
        await host.call("forward_backward", sequences=[one, sequence(6, 7)])
        await host.call("end_step")
        await host.call("forward_backward", sequences=[one])
        await host.close()
        sent = [arguments["sequences"] for _, arguments in ranks.heard if "sequences" in arguments]
        assert [value["numbers"].tolist() for value in sent] == [[0, 1], [1], [0, -1], [-1]]
        assert [[found.tokens.tolist() for found in value["new"]] for value in sent] == [
            [[1, 2], [3, 4, 5]],
            [],
            [[6, 7]],
            [[1, 2]],
        ]


async def test_an_error_of_a_rank_is_raised_here() -> None:
    """Of its own class if asyncrl has it, else with its name and where it was; the learner goes on."""
    refused = Frame(header={"error": "NonFiniteError", "text": "the gradient norm is nan", "trace": ""})
    raised = Frame(header={"error": "OutOfMemoryError", "text": "no memory", "trace": "line 3"})
    async with opened(_says(refused), _says(raised), answered(1)) as (host, _):
        with pytest.raises(NonFiniteError, match="norm is nan"):
            await host.call("optimizer_step")
        with pytest.raises(LearnerError, match="OutOfMemoryError: no memory") as caught:
            await host.call("optimizer_step")
        assert caught.value.__notes__ == ["on the rank:\nline 3"]
        assert await host.call("optimizer_step") == 1


@pytest.mark.parametrize("how", [_end, _half], ids=["between frames", "in a frame"])
async def test_ranks_that_end_are_an_error_with_their_last_words(how: Answer) -> None:
    """Once; later calls are refused at once, and closing is quiet."""
    async with opened(how, words="exit code 1; out of memory") as (host, _):
        with pytest.raises(LearnerError, match="ranks have ended: exit code 1; out of memory"):
            await host.call("forward_backward")
        with pytest.raises(LearnerError, match=r"have ended$"):
            await host.call("discard_gradients")


async def test_a_rank_that_fails_says_why() -> None:
    """Before the connection ends."""
    async with opened(_says(Frame(header={"failed": "rank 1: IndexError: 7"}))) as (host, _):
        with pytest.raises(LearnerError, match="rank of the learner has failed: rank 1: IndexError: 7"):
            await host.call("forward_backward")


async def test_what_is_no_frame_ends_the_learner() -> None:
    """Nothing after it can be read."""

    async def noise(connection: Connection, arguments: dict[str, Any]) -> None:
        await connection._stream.send(b"HTTP/1.1 400 Bad Request")

    async with opened(noise) as (host, _):
        with pytest.raises(LearnerError, match="another protocol"):
            await host.call("forward_backward")
        with pytest.raises(LearnerError, match="have ended"):
            await host.call("forward_backward")


async def test_signs_of_life_are_no_answer_but_silence_is_an_error() -> None:
    """A rank that hangs is given up after the time that it may be silent."""

    async def alive_then_silent(connection: Connection, arguments: dict[str, Any]) -> None:
        await connection.send(Frame(header={"alive": True}))
        await _silence(connection, arguments)

    async with opened(alive_then_silent, silence_s=0.05) as (host, _):
        with pytest.raises(LearnerError, match=r"said nothing for 0\.05 s"):
            await host.call("forward_backward")


async def test_a_call_that_runs_ends_before_its_cancelled_caller() -> None:
    """So what it changes is whole; and the next call gets its own answer."""
    goes_on = anyio.Event()

    async def late(connection: Connection, arguments: dict[str, Any]) -> None:
        await goes_on.wait()
        await answered("late")(connection, arguments)

    async with opened(late, answered("next")) as (host, ranks):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.call, "optimizer_step")
            while len(ranks.heard) < 2:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            goes_on.set()
        assert await host.call("logprobs") == "next"


@pytest.mark.parametrize("turns", range(6))
async def test_a_caller_cancelled_at_any_await_leaves_the_connection_usable(turns: int) -> None:
    """Its call was made or was not, and the answer to the next one is that one's."""
    async with opened(*[_echo] * 4) as (host, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(host.call, "logprobs", start=1))
            tasks.start_soon(partial(host.call, "logprobs", start=2))
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert await host.call("logprobs", start=3) == 3


async def _echo(connection: Connection, arguments: dict[str, Any]) -> None:
    await answered(arguments.get("start"))(connection, arguments)


async def test_a_loss_that_cannot_travel_is_refused_before_anything_is_sent() -> None:
    """With the loss's place, and the learner goes on."""
    async with opened(answered(7)) as (host, _):
        with pytest.raises(ConfigError, match=r"loss is .*must be a frozen dataclass"):
            await host.call("forward_backward", sequences=[sequence(1, 2)], loss=lambda inputs: inputs)
        assert await host.call("logprobs") == 7


async def test_closing_in_the_middle_of_opening_is_quiet() -> None:
    """A run that fails while the model loads closes its learner from another task."""

    class Loading(FakeRanks):
        async def _serve(self, stream: anyio.abc.ByteStream, done: anyio.Event) -> None:
            async with stream:
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        host = RanksHost(OPTIONS, Loading((), tasks))
        async with anyio.create_task_group() as opening:
            opening.start_soon(host.open)
            while host._link is None:
                await anyio.lowlevel.checkpoint()
            await host.close()
        tasks.cancel_scope.cancel()
