"""A run that is stopped at each of its awaits: it ends, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Literal, TypeAlias

import anyio
import pytest

import asyncrl as rl
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.testing import VirtualClock
from asyncrl.types import Step
from tests.scheduling.audit import watched
from tests.scheduling.promises import assert_nothing_is_held
from tests.scheduling.runs import NEWEST, Run, Shape

pytestmark = pytest.mark.slow

Way: TypeAlias = Literal["cancel the scope", "cancel the task", "leave the loop"]


class SteppingClock(VirtualClock):
    """Runs one callback in each pass, any of those that could run: one task gets from one await to its next.

    ``strike`` is called before the pass number ``at`` after it was set.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at
        self._choice = random.Random(0)
        self.strike: Callable[[], object] | None = None

    def _run_once(self) -> None:
        if self.strike is not None:
            self._left -= 1
            if not self._left:
                self.strike()
        ready: deque[object] = self._ready  # type: ignore[attr-defined]
        if ready:
            ready.rotate(self._choice.randrange(len(ready)))
        later = [ready.pop() for _ in range(len(ready) - 1)]
        super()._run_once()
        ready.extendleft(later)


async def stop_when_it_strikes(start: Callable[[], AsyncGenerator[Step, None]], steps: list[Step], way: Way) -> bool:
    """Run until the clock strikes; True if it did before the end. The caller looks at each step for a while."""
    clock, task = asyncio.get_running_loop(), asyncio.current_task()
    assert isinstance(clock, SteppingClock)
    assert task is not None
    left = anyio.Event()
    with anyio.CancelScope() as scope:
        ways: dict[Way, Callable[[], object]] = {
            "cancel the scope": scope.cancel,
            "cancel the task": task.cancel,
            "leave the loop": left.set,
        }
        clock.strike = ways[way]
        try:
            async with aclosing(start()) as run:
                async for step in run:
                    steps.append(step)
                    with anyio.move_on_after(0.8):
                        await left.wait()
                    if left.is_set():
                        break
        except asyncio.CancelledError:
            if way != "cancel the task":
                raise
            task.uncancel()
            return True
        finally:
            clock.strike = None
            assert asyncio.all_tasks() == {task}
    return scope.cancel_called or left.is_set()


def _stop_at(at: int, shape: Shape, way: Way) -> bool:
    """Stop a run before its ``at``-th pass and look at what is left; False if it had ended before."""
    run = Run(shape)
    with run.audited() as audit, watched(OrderedSlots) as slots:
        stopped = anyio.run(
            stop_when_it_strikes,
            run.start,
            run.steps,
            way,
            backend_options={"loop_factory": partial(SteppingClock, at)},
        )
        audit.balance()
    assert len(run.steps) == shape.steps or stopped
    assert_nothing_is_held(run)
    assert all(counter.in_use == 0 for counter in slots)
    assert run.learner.pending == []
    assert run.learner.version == len(run.learner.batches)
    return stopped


_SYNCHRONOUS = Shape(
    groups_per_step=2,
    steps=2,
    concurrency=3,
    requests=2,
    sampling_s=lambda request: 1.0 + 0.1 * int(request.trajectory_id[-1]),
    tool_s=lambda: 0.25,
    publication_s=lambda: 0.5,
    train_s=0.5,
    step_s=0.25,
    trainer={"forward_backward_batch": rl.ForwardBackwardBatch(min_sequences=2)},
)
_ASYNCHRONOUS = Shape(
    max_staleness=1,
    groups_per_step=1,
    steps=3,
    kv_cache=NEWEST,
    concurrency=3,
    requests=2,
    parts=2,
    sampling_s=lambda request: 0.5,
    tool_s=lambda: 0.25,
    publication_s=lambda: 1.0,
    train_s=0.5,
    step_s=0.25,
)
_DEADLINES = Shape(
    max_staleness=1,
    groups_per_step=1,
    group_size=3,
    steps=2,
    concurrency=4,
    requests=2,
    turns=lambda traj: 1 + 2 * (traj.member % 2),
    sampling_s=lambda request: 0.5 + 0.1 * int(request.trajectory_id[-1]),
    tool_s=lambda: 0.25,
    publication_s=lambda: 0.5,
    train_s=0.5,
    trainer={
        "completion": rl.GroupCompletion(mode="deadline", min_members=2, max_straggler_tokens=4),
        "allow_trajectory_loss": True,
    },
)


@pytest.mark.parametrize("way", ["cancel the scope", "cancel the task", "leave the loop"])
@pytest.mark.parametrize(
    "shape", [_SYNCHRONOUS, _ASYNCHRONOUS, _DEADLINES], ids=["synchronous", "asynchronous", "deadlines"]
)
def test_a_run_can_be_stopped_at_every_await(shape: Shape, way: Way) -> None:
    """No request, slot, version, environment or gradient stays, the accounts balance, and the clock never deadlocks."""
    at = 1
    while _stop_at(at, shape, way):
        at += 1
    assert at > 100
