"""The run that ``kill.py`` kills: a process of its own, quick to start.

The trainer, the schedule and the run directory are real. The sampler is scripted, its tokens depend on row, member,
position and version alone; the learner is Adam in numpy on 512 numbers. Prints a line of JSON for each step, and one
with the final parameters.

    python benchmarks/killed.py RUN_DIR '{"steps": 30, "max_staleness": 0, "recovery": "stateless"}'
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson
from safetensors.numpy import load_file, save_file

import asyncrl as rl
from asyncrl.learning.base import ChunkResult, OptimizerSettings, TrainingSequence
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ByteRenderer, ScriptedLearner, ScriptedPublisher, ScriptedSampler, scripted_policy
from asyncrl.types import Message, Row, Trajectory

__all__ = ["GROUPS_PER_STEP", "ROWS"]

ROWS = 50
GROUPS_PER_STEP = 3
_FIRST = 32
# The byte that is row 0: a prompt is one byte, which says its row.
_SIZE = 512
_SAMPLING_S, _TOOL_S = 0.006, 0.004


class NumpyLearner(ScriptedLearner):
    """Adam on ``_SIZE`` float32 numbers. ``rows`` is part of its state: for each step, the rows that were trained."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self._state = {name: np.zeros(_SIZE, dtype=np.float32) for name in ("values", "mean", "square")}
        self._gradient = np.zeros(_SIZE, dtype=np.float32)

    async def forward_backward(self, sequences: Sequence[TrainingSequence], loss: Any) -> ChunkResult:
        """Each trained token pulls at one number."""
        for sequence in sequences:
            pull = (sequence.advantage * sequence.weight * sequence.logprobs[sequence.mask]).astype(np.float32)
            np.add.at(self._gradient, sequence.tokens[sequence.mask] % _SIZE, pull)
        return await super().forward_backward(sequences, loss)

    async def optimizer_step(self, settings: OptimizerSettings, *, divisor: float) -> Mapping[str, float]:
        """Adam without correction of its bias."""
        self.rows.append(sorted({int(sequence.tokens[0]) - _FIRST for sequence in self.pending}))
        gradient = self._gradient / np.float32(divisor)
        state = self._state
        state["mean"] += np.float32(1 - settings.beta1) * (gradient - state["mean"])
        state["square"] += np.float32(1 - settings.beta2) * (gradient * gradient - state["square"])
        state["values"] -= np.float32(settings.lr) * state["mean"] / (np.sqrt(state["square"]) + np.float32(1e-8))
        self._gradient[:] = 0
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

    @property
    def parameters(self) -> str:
        """A digest of every bit."""
        return hashlib.sha256(b"".join(self._state[name].tobytes() for name in sorted(self._state))).hexdigest()


def sampled(request: SegmentRequest) -> list[int]:
    """Tokens from row, member, position and version."""
    member = request.trajectory_id.rpartition("-")[2]
    draw = random.Random(f"{int(request.input_ids[0])} {member} {len(request.input_ids)} {request.version}")
    return [256 + draw.randrange(4096) for _ in range(draw.randrange(2, 8))] + [END]


class Talk(rl.Env):
    """Two turns with a tool between them; the reward is a function of the tokens."""

    def __init__(self, recovery: str) -> None:
        self.recovery = recovery  # type: ignore[assignment]
        self._turns = 0

    async def reset(self, row: Row) -> list[Message]:
        """One byte."""
        return [{"role": "user", "content": chr(_FIRST + row)}]

    async def on_turn(self, traj: Trajectory) -> list[Message] | None:
        """A tool that takes a while."""
        await anyio.sleep(random.expovariate(1 / _TOOL_S))
        self._turns += 1
        return None if traj.turns == 2 else [{"role": "user", "content": "+"}]

    async def reward(self, traj: Trajectory, row: Row) -> float:
        """Differs between members, so that every group has a gradient."""
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


async def _run(directory: Path, options: dict[str, Any]) -> None:
    staleness = options["max_staleness"]
    learner = NumpyLearner()
    policy = scripted_policy(
        sampler=ScriptedSampler(seconds=lambda request: random.expovariate(1 / _SAMPLING_S), tokens=sampled),
        learner=learner,
        publisher=ScriptedPublisher(seconds=lambda: random.expovariate(1 / _SAMPLING_S)),
    )
    trainer = rl.AsyncTrainer(
        engine=rl.RolloutEngine(policy, env=lambda: Talk(options["recovery"]), renderer=_Renderer()),
        optimizer=rl.Adam(lr=1e-2),
        groups_per_step=GROUPS_PER_STEP,
        group_size=4,
        max_staleness=staleness,
        # What a synchronous run trains, and in which order, is then a function of the rows.
        batch_order="admission",
        forward_backward_batch=None,
        checkpointing=rl.Checkpointing(directory, weights_every=7, rollout_every=0.05),
    )
    async with aclosing(trainer.run(list(range(ROWS)), steps=options["steps"])) as steps:
        async for step in steps:
            _say(n=step.n, age=step.metrics["staleness/span_age_max"], replayed=step.metrics["recovery/steps_replayed"])
    _say(parameters=learner.parameters, rows=learner.rows, version=learner.version)


if __name__ == "__main__":
    anyio.run(_run, Path(sys.argv[1]), json.loads(sys.argv[2]))
