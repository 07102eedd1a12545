"""Two servers, one is killed in the middle of a run and comes back with base weights: what is lost?

Real processes: the guess-a-number recipe, all weights trained, on two servers. After ``--steps`` steps one of them gets
SIGKILL; after as many more it is started again on its port, with the weights of the model folder; as many steps after
it takes requests again the run ends. Prints one JSON line for each question.

    uv run python benchmarks/outage.py
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from asyncrl.events import Event, MemberFailed, Notice, SegmentSampled, VersionPublished
from asyncrl.recipe.compose import ComposedRun, compose
from asyncrl.recipe.config import load_recipe
from asyncrl.types import Step
from benchmarks.answer import Answer

RECIPE = Path(__file__).parent.parent / "envs/guess_number/recipe.toml"
STALENESS = 2
LONGEST = 20
# Times ``--steps``: a run in which the server does not come back ends all the same.
SLACK_STEPS = 2
# Steps after a kill or a return that are left out of the rates: they are a mixture.


@dataclass(slots=True, kw_only=True)
class Record:
    """What happened, on the loop's clock."""

    segments: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens)"""
    failures: list[str] = field(default_factory=list)
    probe_error: float = 0.0
    notices: list[tuple[float, str]] = field(default_factory=list)
    trained: Counter[int] = field(default_factory=Counter)
    """Group -> how often it was trained."""
    oldest: int = 0
    newest: int = 0
    ends: list[float] = field(default_factory=list)
    """When each step was over."""
    returned_in: int | None = None
    """The step in which the server took requests again."""

    def observe(self, event: Event) -> None:
        """Take note of ``event``."""
        match event:
            case SegmentSampled():
                self.segments.append((event.time, event.tokens))
            case MemberFailed():
                self.failures.append(event.error)
            case VersionPublished():
                self.probe_error = max(self.probe_error, event.probe_error)
            case Notice():
                self.notices.append((event.time, event.name))

    def take(self, step: Step) -> None:
        """Take note of what ``step`` trained."""
        self.ends.append(anyio.current_time())
        self.trained.update({member.group for member in step.trajectories})
        ages = [
            step.model_step - 1 - span.version
            for member in step.trajectories
            for span in member.spans
            if span.version is not None
        ]
        self.oldest, self.newest = max(self.oldest, *ages), min(self.newest, *ages)

    def rate(self, first: int, last: int) -> float:
        """Sampled tokens per second from the end of step ``first`` to that of ``last``."""
        start, end = self.ends[first - 1], self.ends[last - 1]
        return sum(tokens for time, tokens in self.segments if start <= time < end) / (end - start)

    def seconds_to(self, name: str, after: float) -> float | None:
        """From ``after`` to the first notice of that name."""
        return next((time - after for time, found in self.notices if found == name and time >= after), None)


class Server:
    """A server process on a port of its own, that can be killed and started again."""

    def __init__(self, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        serve = [sys.executable, "-m", "asyncrl", "serve", "--model", str(model)]
        self._command = [*serve, "--port", str(port), "--exit-with-stdin"]
        self._process: anyio.abc.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it takes requests."""
        self._process = await anyio.open_process(self._command, stderr=sys.stderr, start_new_session=True)
        assert self._process.stdout is not None
        await self._process.stdout.receive()

    async def kill(self) -> None:
        """End it without a chance to say so."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await self._process.aclose()
            self._process = None


@asynccontextmanager
async def started(model: Path) -> AsyncGenerator[tuple[Server, Server], None]:
    """Two servers that are up."""
    servers = Server(model), Server(model)
    try:
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(server.start)
        yield servers
    finally:
        for server in servers:
            await server.kill()


async def measure(phase: int) -> tuple[Record, float, float]:
    """Run it: the record, and when the server was killed and back up."""
    record = Record()
    overrides = [f"trainer.steps={LONGEST * phase}", f"trainer.max_staleness={STALENESS}"]
    model = await anyio.to_thread.run_sync(_model, overrides)
    async with started(model) as (lasting, mortal):
        urls = f'sampler.urls=["{lasting.url}", "{mortal.url}"]'
        composed = await anyio.to_thread.run_sync(_compose, [*overrides, "sampler.backend=sglang", urls])
        composed.trainer.events.subscribe(record.observe)
        killed, restarted = 0.0, anyio.current_time()
        run = composed.trainer.run(composed.rows, steps=LONGEST * phase)
        async with anyio.create_task_group() as tasks, aclosing(run):

            async def restart() -> None:
                nonlocal restarted
                await mortal.start()
                restarted = anyio.current_time()

            async for step in run:
                record.take(step)
                if step.n == phase:
                    killed = anyio.current_time()
                    await mortal.kill()
                elif step.n == 2 * phase:
                    tasks.start_soon(restart)
                elif record.returned_in is None and killed and record.seconds_to("server_returned", killed):
                    record.returned_in = step.n
                elif record.returned_in is not None and step.n == record.returned_in + phase:
                    break
    return record, killed, restarted


def _compose(overrides: list[str]) -> ComposedRun:
    return compose(load_recipe(RECIPE, overrides))


def _model(overrides: list[str]) -> Path:
    return _compose(overrides).engine.policy.learner.model_path


def answers(record: Record, killed: float, restarted: float, *, phase: int) -> list[Answer]:
    """What the run says about each question."""
    before = record.rate(SLACK_STEPS, phase)
    during = record.rate(phase + SLACK_STEPS, 2 * phase)
    back = record.returned_in
    after = None if back is None else record.rate(back + SLACK_STEPS, len(record.ends))
    back_s = record.seconds_to("server_returned", restarted)
    lost = len(record.ends) * int(load_recipe(RECIPE).trainer["groups_per_step"]) - len(record.trained)
    twice = sum(count - 1 for count in record.trained.values())
    wrong = int(record.oldest > STALENESS or record.newest < 0)
    out_s = record.seconds_to("server_quarantined", killed)

    def exact(question: str, figure: float | None, goal: str, meets: bool, unit: str) -> Answer:
        return Answer(
            question=question,
            figure=figure,
            unit=unit,
            anchor="",
            anchor_figure=None,
            ratio=None,
            goal=goal,
            meets_goal=meets,
        )

    def relative(question: str, figure: float | None, least: float) -> Answer:
        ratio = None if figure is None else figure / before
        return Answer(
            question=question,
            figure=figure,
            unit="sampled tokens/s",
            anchor="before the kill",
            anchor_figure=before,
            ratio=ratio,
            goal=f"at least {least} of the anchor",
            meets_goal=ratio is not None and ratio >= least,
        )

    return [
        exact("groups lost", lost, "0", lost == 0, "groups"),
        exact("groups trained twice", twice, "0", twice == 0, "groups"),
        exact("trained tokens of a version out of bounds", wrong, "0", wrong == 0, "0 or 1"),
        exact("attempts of members that failed", len(record.failures), "0", not record.failures, "attempts"),
        exact("largest probe difference", record.probe_error, "1e-4", record.probe_error <= 1e-4, "nats"),
        exact("from the kill to the quarantine", out_s, "10 s", out_s is not None and out_s <= 10, "s"),
        exact("from the new process to its first request", back_s, "60 s", back_s is not None and back_s <= 60, "s"),
        relative("sampling while one server is away", during, 0.4),
        relative("sampling after it is back", after, 0.8),
    ]


def main() -> None:
    """Measure, and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of each phase")
    phase = parser.parse_args().steps
    for answer in answers(*anyio.run(measure, phase), phase=phase):
        print(answer.line(), flush=True)


if __name__ == "__main__":
    main()
