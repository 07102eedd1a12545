"""Where a run may ask for signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import asyncrl as rl
from asyncrl.checkpoint.options import StopSignal
from asyncrl.errors import ConfigError
from asyncrl.testing import ByteRenderer, scripted_policy
from tests.faults.case import One


def _in_thread(function: Callable[[], object]) -> BaseException | None:
    """What ``function`` raised in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  handed to the test
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("names", [(), ("SIGINT",), ("SIGTERM",), ("SIGINT", "SIGTERM")])
def test_signals_are_refused_outside_of_the_main_thread(tmp_path: Path, names: tuple[StopSignal, ...]) -> None:
    """By the option's name and before anything is sampled; without signals a run in a thread is like any other."""
    engine = rl.RolloutEngine(scripted_policy(), env=One, renderer=ByteRenderer())
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-3),
        groups_per_step=1,
        group_size=2,
        max_staleness=0,
        checkpointing=rl.Checkpointing(tmp_path, on_signal=names),
    )
    steps: list[rl.Step] = []

    async def main() -> None:
        async for step in trainer.run([1], steps=1):
            steps.append(step)

    before = {name: signal.getsignal(signal.Signals[name]) for name in ("SIGINT", "SIGTERM")}
    error = _in_thread(lambda: anyio.run(main))
    if names:
        assert isinstance(error, ConfigError)
        assert str(error).startswith(f"checkpointing.on_signal is {names!r}, but must be () outside of the main thread")
    assert bool(steps) == (not names)
    assert (error is None) == (not names)
    assert before == {name: signal.getsignal(signal.Signals[name]) for name in before}
