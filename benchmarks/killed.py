"""The run that ``kill.py`` kills: a process of its own, quick to start.

The trainer, the schedule and the run directory are real. The sampler is scripted, its tokens depend on row, member,
position and version alone; the learner is Adam in numpy on 512 numbers. With ``fleet`` the client and the publisher are
real too, on three scripted servers that are removed and added again all the time. ``mode`` is the completion mode.
Rows are as ugly as real ones: see ``Talk``. Prints a line of JSON for each publication and each step, and
one with the final parameters.

    python benchmarks/killed.py RUN_DIR '{"steps": 30, "max_staleness": 0, "recovery": "stateless", "mode": "wait"}'
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson
from safetensors.numpy import load_file, save_file

import asyncrl as rl
from asyncrl.checkpoint.journal import Journal
from asyncrl.errors import RequestRefused
from asyncrl.events import VersionPublished
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing import END, ByteRenderer, ScriptedPublisher, ScriptedSampler, scripted_policy
from asyncrl.testing.server import GenerateCall, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner
from asyncrl.types import Message, Row, Segment, Trajectory, TruncationCause

__all__ = ["GROUPS_PER_STEP", "ROWS", "SLOW", "trainer_options"]

ROWS = 200
"""More than a run admits: each of its groups has a row of its own."""
GROUPS_PER_STEP = 3
SLOW = 3
"""The member that is slow, so that groups have a quorum long before their end."""
_FIRST = 32
# The byte that is row 0: a prompt is one byte, which says its row.
_SIZE = 512
_SAMPLING_S, _TOOL_S = 0.006, 0.004
_CONTEXT = 100
_URLS = ("http://one:30000", "http://two:30000", "http://three:30000")
_ODD = (np.float32(0.5), Decimal("0.25"), float("nan"), 10**25, True)


class NumpyLearner(ThetaLearner):
    """Adam on ``_SIZE`` float32 numbers. ``rows`` is part of its state: for each step, the rows that were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self._state = {name: np.zeros(_SIZE, dtype=np.float32) for name in ("values", "mean", "square")}
        self._gradient = np.zeros(_SIZE, dtype=np.float32)

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        """Each trained token pulls at one number."""
        for sequence in sequences:
            pull = (sequence.advantage * sequence.weight * sequence.logprobs[sequence.mask]).astype(np.float32)
            np.add.at(self._gradient, sequence.tokens[sequence.mask] % _SIZE, pull)
        return await super().forward_backward(sequences, loss, updates=updates)

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Adam without correction of its bias."""
        self.rows.append(sorted({int(sequence.tokens[0]) - _FIRST for sequence in self.pending}))
        gradient = self._gradient / np.float32(divisor)
        state = self._state
        state["mean"] += np.float32(1 - settings.beta1) * (gradient - state["mean"])
        state["square"] += np.float32(1 - settings.beta2) * (gradient * gradient - state["square"])
        state["values"] -= np.float32(settings.lr) * state["mean"] / (np.sqrt(state["square"]) + np.float32(1e-8))
        self._gradient[:] = 0
        self.theta = self._theta
        done = await super().optimizer_step(settings, divisor=divisor)
        self.batches.clear()  # nobody looks at them here
        return done

    async def discard_gradients(self) -> None:
        """Forget the open batch."""
        self._gradient[:] = 0
        await super().discard_gradients()

    async def save_state(self, directory: Path) -> None:
        """Numbers and rows."""
        save_file(self._state, directory / "numpy.safetensors")
        (directory / "rows.json").write_bytes(orjson.dumps(self.rows))

    async def load_state(self, directory: Path) -> None:
        """Go on from there."""
        self._state = {name: array.copy() for name, array in load_file(directory / "numpy.safetensors").items()}
        self.rows = orjson.loads((directory / "rows.json").read_bytes())
        self.version = len(self.rows)
        self.theta = self._theta

    @property
    def _theta(self) -> float:
        """What servers of the fleet sample with."""
        return float(self._state["values"].sum())

    @property
    def parameters(self) -> str:
        """A digest of every bit."""
        return hashlib.sha256(b"".join(self._state[name].tobytes() for name in sorted(self._state))).hexdigest()


def sampled(request: SegmentRequest) -> list[int]:
    """Tokens from row, member, position and version."""
    member = request.trajectory_id.rpartition("-")[2]
    draw = random.Random(f"{int(request.input_ids[0])} {member} {len(request.input_ids)} {request.version}")
    return [256 + draw.randrange(4096) for _ in range(draw.randrange(2, 8))] + [END]


def _answered(call: GenerateCall) -> list[int]:
    """The same of a server, which knows the member by the seed only."""
    draw = random.Random(f"{call.input_ids[0]} {call.sampling_params['sampling_seed']}")
    return [256 + draw.randrange(4096) for _ in range(draw.randrange(2, 8))] + [END]


class _Sampler(ScriptedSampler):
    """Refuses some requests for good."""

    async def sample(self, request: SegmentRequest) -> Segment:
        """As usual, or not at all."""
        if (int(request.input_ids[0]) - _FIRST) % 20 == 1 and request.trajectory_id.endswith("2"):
            await anyio.sleep(_SAMPLING_S)
            raise RequestRefused("this one is refused")
        return await super().sample(request)


class Talk(rl.Env):
    """Two turns with a tool between them; the reward is a function of the tokens.

    Of ten rows one has a prompt that is too long, one fails once (its group is rolled out anew), one always (its group
    is dropped), one has a reward that raises for a member, and one reports metrics of odd types.
    """

    def __init__(self, recovery: str) -> None:
        self.recovery = recovery  # type: ignore[assignment]
        self._turns = 0

    async def reset(self, row: Row) -> list[Message]:
        """One byte, but for a row that leaves no room for an answer."""
        return [{"role": "user", "content": chr(_FIRST + row) + "x" * (row % 10 == 3) * _CONTEXT}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        """A tool that takes a while."""
        await anyio.sleep(random.expovariate(1 / _TOOL_S))
        self._turns += 1
        if traj.member == 1 and (traj.row % 10 == 7 or (traj.row % 10 == 5 and traj.attempt == 1)):
            await anyio.sleep(4 * _TOOL_S)
            raise rl.InfrastructureError("the sandbox is gone")
        return None if traj.turns == 2 else [{"role": "user", "content": "+"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """Differs between members, so that every group has a gradient."""
        if row % 10 == 8 and traj.member == 0:
            raise KeyError("no such answer")
        if row % 10 == 2:
            metrics: dict[str, Any] = traj.metrics
            metrics["odd"] = _ODD[row // 10 % len(_ODD)]
        return float(int(traj.tokens().sum()) % 23) + traj.member / 100

    async def on_truncated(self, traj: Trajectory, row: Row, cause: TruncationCause) -> float:
        """As far as it came."""
        return float(int(traj.tokens().sum()) % 23) + traj.member / 100

    async def snapshot(self, traj: Trajectory) -> Any:
        """The number of turns."""
        return self._turns

    async def restore(self, traj: Trajectory, state: Any) -> None:
        """The number of turns."""
        self._turns = state


class _Renderer(ByteRenderer):
    """Does not read the sampled numbers as text."""

    async def parse(self, turn_ids: Any, tools: Any = ()) -> Any:
        """An empty message."""
        return await super().parse(turn_ids[:0], tools)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def trainer_options(mode: str) -> dict[str, Any]:
    """Of the trainer, for a completion mode."""
    if mode == "wait":
        return {"batch_order": "admission"}
    completion = rl.GroupCompletion(mode="deadline", max_straggler_tokens=2, on_stragglers=mode)  # type: ignore[arg-type]
    options = {"completion": completion, "allow_trajectory_loss": True}
    if mode == "truncate":
        return {**options, "batch_order": "admission"}
    return {**options, "stale_policy": "mask_span", "advantage": rl.Batchwise()}


def _seconds(slow: bool) -> float:
    return random.expovariate(1 / _SAMPLING_S) * (6 if slow else 1)


async def _churn(sampler: SGLang, changes: list[str], scope: anyio.CancelScope) -> None:
    """Take servers out of use and back into it, one at a time, so that two are always there."""
    with scope:
        for url in itertools.cycle(_URLS):
            await anyio.sleep(random.expovariate(1 / 0.05))
            sampler.remove(url, now=random.random() < 0.5)
            changes.append(url)
            await anyio.sleep(random.expovariate(1 / 0.02))
            sampler.add(url)


def _fleet(learner: NumpyLearner, directory: Path) -> tuple[rl.Policy, SGLang]:
    servers = {
        url: ScriptedServer(tokens=_answered, seconds=lambda call: _seconds(random.random() < 0.2)) for url in _URLS
    }
    sampler = SGLang(list(servers), transport=network(servers))
    adapters = DiskAdapters(learner, directory / "adapters")
    probe = Probe(tokens=np.arange(8, dtype=np.int32))
    publisher = LoraPublisher(learner, sampler, adapters, "run", probe=probe)
    return rl.Policy(learner, sampler=sampler, publisher=publisher), sampler


def _scripted(learner: NumpyLearner) -> rl.Policy:
    return scripted_policy(
        sampler=_Sampler(
            seconds=lambda request: _seconds(request.trajectory_id.endswith(str(SLOW))),
            tokens=sampled,
        ),
        learner=learner,
        publisher=ScriptedPublisher(seconds=lambda: random.expovariate(1 / _SAMPLING_S)),
    )


def _forget_nothing(self: Journal, n: int) -> None:
    """The whole journal can be looked at in the end."""


async def _run(directory: Path, options: dict[str, Any]) -> None:
    learner = NumpyLearner()
    policy, fleet = _fleet(learner, directory) if options.get("fleet") else (_scripted(learner), None)
    engine = rl.RolloutEngine(
        policy,
        env=lambda: Talk(options["recovery"]),
        renderer=_Renderer(),
        budget=rl.Budget(max_context_tokens=_CONTEXT),
        failures=rl.Failures(member_retries=0, consecutive=1_000_000, retry_delay=0.002),
    )
    trainer = rl.AsyncTrainer(
        engine=engine,
        optimizer=rl.Adam(lr=1e-2),
        groups_per_step=GROUPS_PER_STEP,
        group_size=4,
        max_staleness=options["max_staleness"],
        # What a synchronous run trains, and in which order, is then a function of the rows.
        forward_backward_batch=None,
        checkpointing=rl.Checkpointing(directory, weights_every=7, rollout_every=0.05),
        **trainer_options(options["mode"]),
    )
    trainer.events.subscribe(lambda event: _say(begun=True), kinds=(VersionPublished,))
    changes: list[str] = []
    churn = anyio.CancelScope()
    run = trainer.run(list(range(ROWS)), steps=options["steps"])
    async with aclosing(run) as steps, anyio.create_task_group() as tasks:
        async for step in steps:
            if fleet is not None and not changes:
                tasks.start_soon(_churn, fleet, changes, churn)
                changes.append("begun")
            if step.n == options["steps"]:
                churn.cancel()  # the servers are closed next
            metrics = step.metrics
            _say(
                n=step.n,
                age=metrics["staleness/span_age_max"],
                replayed=metrics["recovery/steps_replayed"],
                begun_anew=metrics["recovery/groups_begun_anew"],
                rerolled=metrics["ledger/rerolled_groups"],
                removed=len(changes),
            )
    _say(parameters=learner.parameters, rows=learner.rows, version=learner.version)


if __name__ == "__main__":
    Journal.forget = _forget_nothing  # type: ignore[method-assign]
    anyio.run(_run, Path(sys.argv[1]), json.loads(sys.argv[2]))
