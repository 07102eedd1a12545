"""The table of metrics against what real parts emit, on the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import asyncrl as rl
from asyncrl.events import EvaluationFinished
from asyncrl.learning.losses import LossInputs, LossOutput, loss_kinds
from asyncrl.observe.metricnames import EVALUATION_METRICS, STEP_METRICS, MetricReference, described
from asyncrl.observe.metrics import BatchMetrics
from asyncrl.types import Row, Trajectory
from tests.resume.runs import Chat, Life, Plan


class _Tooled(Chat):
    @rl.tool
    async def search(self, words: str) -> str:
        """Find something."""
        return words

    async def reward(self, traj: Trajectory, row: Row) -> float:
        traj.add_metric("won", 1.0)
        return await super().reward(traj, row)


class _AllLosses:
    """Reports what any of them does; the scripted learner computes none."""

    token_data = ()
    diagnostics = tuple(sorted({name for kind in loss_kinds().values() for name in kind.diagnostics}))

    def per_token(self, inputs: LossInputs) -> LossOutput:
        raise NotImplementedError


def _life(directory: Path) -> Life:
    beside = {"correction": rl.Correction(token="mask"), "kl": rl.KLPenalty(coefficient=0.1)}
    plan = Plan(steps=2, heldout=2, max_staleness=1, trainer={"loss": _AllLosses(), **beside})
    return Life(plan, directory, env=_Tooled)


def _names(table: Mapping[str, MetricReference], emitted: set[str]) -> set[str | None]:
    return {described(table, key) for key in emitted}


def test_every_metric_that_a_run_emits_is_in_the_table_and_the_other_way_round(tmp_path: Path) -> None:
    """With what all losses report, because a loss has numbers of its own."""
    life = _life(tmp_path)
    life.play()
    steps = {key for step in life.steps for key in step.metrics}
    evaluations = {key for event in life.of(EvaluationFinished) for key in event.metrics}
    # Names of tools are known where the environment is a class.
    steps |= set(BatchMetrics(version=0, max_staleness=0, tools=("search",)).metrics())
    assert {key for key in steps if described(STEP_METRICS, key) is None} == set()
    assert set(STEP_METRICS) - _names(STEP_METRICS, steps) == set()
    assert {key for key in evaluations if described(EVALUATION_METRICS, key) is None} == set()
    assert set(EVALUATION_METRICS) - _names(EVALUATION_METRICS, evaluations) == set()


@pytest.mark.parametrize("name", [*STEP_METRICS, *EVALUATION_METRICS])
def test_every_metric_has_a_unit_and_a_sentence(name: str) -> None:
    """Short, and in whole sentences."""
    metric = {**STEP_METRICS, **EVALUATION_METRICS}[name]
    assert metric.unit
    assert metric.text.endswith(".")
    assert metric.text.isascii()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("rollout/won", "rollout/<key>"),
        ("rollout/won_mean", "rollout/<key>_mean"),
        ("rollout/tool_calls", "rollout/tool_calls"),
        ("rollout/tool_calls/search", "rollout/tool_calls/<tool>"),
        ("staleness/age_tokens/3", "staleness/age_tokens/<age>"),
        ("staleness/age_tokens/older", "staleness/age_tokens/older"),
        ("staleness/nothing", None),
    ],
)
def test_a_key_has_the_narrowest_name(key: str, name: Any) -> None:
    """Its own, or the pattern that says the most of it."""
    assert described(STEP_METRICS, key) == name
