"""Whole runs in which something fails, with accounts that are checked at every event."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import asyncrl as rl
from asyncrl.events import BarrierOpened, BatchTaken, Event, Events, GroupConsumed, Notice
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.rollout.toolcalls import ParsedTurn, parse_hermes
from asyncrl.rollout.tools import Tool
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.scheduling.admission import Admission
from asyncrl.scheduling.ledger import Ledger
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.testing import (
    END,
    ByteRenderer,
    ScriptedLearner,
    ScriptedPublisher,
    ScriptedSampler,
    run_virtual,
    scripted_policy,
)
from asyncrl.testing.server import ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner
from asyncrl.types import IntArray, Message, Row, Step, Trajectory, TruncationCause
from tests.scheduling.audit import watched

__all__ = [
    "AGAIN",
    "CALL",
    "PROBE_TOKENS",
    "UNTRAINED",
    "Audit",
    "Case",
    "HermesRenderer",
    "One",
    "ServerCase",
    "with_tool",
]

T = TypeVar("T")

CALL = b'<tool_call>{"name": "work", "arguments": {}}</tool_call>'
"""What a model writes that calls the tool ``work``."""
PROBE_TOKENS = 8
AGAIN = rl.Failures(consecutive=1000, user_error_steps=0, untrained_batches=0, retry_delay=0.0)
"""Failures never end the run."""
UNTRAINED = rl.Failures(untrained_batches=0)
"""Nothing need be trained."""


class HermesRenderer(ByteRenderer):
    """Bytes, with tool calls."""

    async def parse(self, turn_ids: IntArray, tools: Any = ()) -> ParsedTurn:
        return parse_hermes(turn_ids[turn_ids != END].astype(np.uint8).tobytes().decode("latin-1"))


class One(rl.Env):
    """One turn; the reward is the member's number, so that a group has variance. Counts who is open."""

    open = 0

    def __init__(self) -> None:
        self.closed = 0
        type(self).open += 1

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": f"{row}"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        return float(traj.member)

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        return float(traj.member)

    async def close(self) -> None:
        self.closed += 1
        assert self.closed == 1
        type(self).open -= 1


def with_tool(tool: Tool) -> type[One]:
    """An environment with this tool, which is named ``work``."""
    return type("WithTool", (One,), {"work": tool, "open": 0})


def _calls_the_tool(request: SegmentRequest) -> list[int]:
    """Once, then it answers."""
    return [*(b"ok" if CALL in request.input_ids.astype(np.uint8).tobytes() else CALL), END]


class Audit:
    """Reads a run's events: the ledger balances at each, and its owner of reservations says the same."""

    def __init__(self, admissions: list[Admission]) -> None:
        self.ledger = Ledger()
        self._admissions = admissions
        self._in_batch = 0

    def observe(self, event: Event) -> None:
        """Enter ``event`` and compare."""
        self.ledger.observe(event)
        match event:
            case BatchTaken():
                self._in_batch += len(event.groups)
            case GroupConsumed():
                self._in_batch -= 1
            case BarrierOpened():
                return  # the batch has left Admission, and is reported next
        for admission in self._admissions:
            assert admission.admitted == self.ledger.totals.admitted
            assert admission.outstanding + self._in_batch == len(list(self.ledger.open))


class Case:
    """A trainer on scripted parts, and everything that it reported."""

    def __init__(
        self,
        env: Callable[[], rl.Env] = One,
        *,
        sampler: ScriptedSampler | None = None,
        learner: ScriptedLearner | None = None,
        publisher: ScriptedPublisher | None = None,
        engine: Mapping[str, Any] | None = None,
        **trainer: Any,
    ) -> None:
        self.sampler = sampler or ScriptedSampler(tokens=_calls_the_tool if getattr(env, "tools", ()) else None)
        self.learner = learner or ScriptedLearner()
        self.publisher = publisher or ScriptedPublisher()
        policy = scripted_policy(sampler=self.sampler, learner=self.learner, publisher=self.publisher)
        self._compose(policy, env, engine or {}, trainer)

    def _compose(
        self, policy: rl.Policy, env: Callable[[], rl.Env], engine: Mapping[str, Any], trainer: Mapping[str, Any]
    ) -> None:
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self.bus = Events()
        self.bus.subscribe(self.events.append)
        options = {"groups_per_step": 2, "group_size": 2, "max_staleness": 0, "optimizer": rl.Adam(lr=1e-3)}
        self.group_size = int(trainer.get("group_size", 2))
        self.whole_groups = "completion" not in trainer
        # Of parts of groups Admission counts members.
        self.engine = rl.RolloutEngine(
            policy, env=env, **{"renderer": HermesRenderer(), "environment_timeout": math.inf, **engine}
        )
        self.trainer = rl.AsyncTrainer(engine=self.engine, events=self.bus, **{**options, **trainer})
        self.audit = Audit([])

    @contextmanager
    def audited(self) -> Iterator[list[OrderedSlots]]:
        """Accounts that are checked at every event; yields the counters of slots."""
        with watched(Admission) as admissions, watched(OrderedSlots) as slots:
            self.audit = Audit(admissions if self.whole_groups else [])
            unsubscribe = self.bus.subscribe(self.audit.observe)
            try:
                yield slots
            finally:
                unsubscribe()

    def start(self, steps: int, rows: Any) -> AsyncGenerator[Step, None]:
        """The steps of the run; ``rows`` are the rows, or their number."""
        return self.trainer.run(list(range(rows)) if isinstance(rows, int) else rows, steps=steps)

    async def _run(self, steps: int, rows: Any) -> None:
        async for step in self.start(steps, rows):
            self.steps.append(step)

    def play(self, steps: int = 3, rows: Any = 4, *, seed: int | None = None) -> None:
        """Take all steps on a virtual clock; then nothing is held, whether it ended well or not."""
        with self.audited() as slots:
            try:
                run_virtual(self._run, steps, rows, seed=seed)
            finally:
                self.assert_nothing_is_held(slots)

    def assert_nothing_is_held(self, slots: list[OrderedSlots]) -> None:
        """No slot, request or version."""
        assert all(counter.in_use == 0 for counter in slots)
        assert self.sampler.in_flight == 0
        assert not +self.publisher.holders
        assert self.learner.pending == []

    def of(self, kind: type[T]) -> list[T]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def notices(self, name: str) -> list[Mapping[str, object]]:
        """What was said under that name."""
        return [event.keys for event in self.of(Notice) if event.name == name]

    def assert_exactly_once(self) -> None:
        """Each row that was admitted is in one step, or was dropped; each member of it is trained or has a reason."""
        totals = self.audit.ledger.totals
        consumed = Counter(event.group for event in self.of(GroupConsumed) if event.final)
        assert set(consumed.values()) <= {1}
        assert sorted(consumed) == sorted({traj.group for step in self.steps for traj in step.trajectories})
        assert totals.consumed == len(consumed)
        assert totals.admitted == totals.consumed + totals.dropped.total()
        assert totals.trained_members + totals.dropped_members.total() == totals.consumed * self.group_size


class ServerCase(Case):
    """The same on scripted SGLang servers, with the real client and publisher between."""

    sampler: Any
    publisher: Any

    def __init__(
        self,
        directory: Path,
        servers: Mapping[str, ScriptedServer],
        env: Callable[[], rl.Env] = One,
        *,
        retries: int = 3,
        engine: Mapping[str, Any] | None = None,
        **trainer: Any,
    ) -> None:
        self.servers = servers
        self.learner = ThetaLearner()
        self.sampler = SGLang(list(servers), transport=network(servers), retries=retries)
        adapters = DiskAdapters(self.learner, directory)
        self.publisher = LoraPublisher(
            self.learner,
            self.sampler,
            adapters,
            "run",
            probe=Probe(tokens=np.arange(PROBE_TOKENS, dtype=np.int32)),
        )
        policy = rl.Policy(self.learner, sampler=self.sampler, publisher=self.publisher)
        self._compose(policy, env, engine or {}, trainer)

    def assert_nothing_is_held(self, slots: list[OrderedSlots]) -> None:
        """No slot, and no request on any server."""
        assert all(counter.in_use == 0 for counter in slots)
        assert all(server.in_flight == 0 for server in self.servers.values())
        assert self.learner.pending == []
