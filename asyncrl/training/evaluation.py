"""Evaluator: held-out rows, rolled out under one version.

Evaluations run with their own reservations, outside the trainer's slots. A row whose trajectories fail for good is left
out of the means and counted. The trainer waits for one where it is due
and publishes nothing meanwhile, so that every trajectory of it is of the version that it measures; rollouts for
training go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio

from asyncrl.concurrency.endings import LazyCoroutine
from asyncrl.errors import ConfigError, require_count
from asyncrl.events import EvaluationFinished, Events, Notice, RolloutsFinished
from asyncrl.plain import error_text
from asyncrl.rollout.border import checked_rows
from asyncrl.rollout.engine import EngineSession
from asyncrl.rollout.groupplan import FailedGroup
from asyncrl.rollout.usercode import place_of
from asyncrl.training.measures import measures
from asyncrl.types import Group, Row

__all__ = ["Evaluator"]

_NAME = "heldout"
# Of the rows that are measured: a run has no others.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Rolls out ``rows`` before the first step, after the last one, and every ``every`` steps in between (0: never)."""

    rows: Sequence[Row]
    every: int = 0
    """Steps between two evaluations; 0: only before the first step and after the last one."""
    group_size: int = 2
    """Trajectories of each row."""
    temperature: float | None = None
    """Of sampling. None: the one that is trained with. 0 is greedy: always the likeliest token."""
    pass_reward: float = 1.0
    """A trajectory passes, for pass@k, if its reward is at least this."""

    def __post_init__(self) -> None:
        require_count("evaluation.every", self.every, least=0)
        require_count("evaluation.group_size", self.group_size, least=1)
        object.__setattr__(self, "rows", checked_rows(self.rows, "evaluation.rows"))
        if self.temperature is not None and self.temperature < 0:
            raise ConfigError.for_value("evaluation.temperature", self.temperature, "at least 0")

    def due(self, n: int, steps: int) -> bool:
        """True if an evaluation follows step ``n`` of ``steps`` (0: before the first)."""
        return n in (0, steps) or (self.every > 0 and n % self.every == 0)

    async def evaluate(self, session: EngineSession, *, n: int = 0) -> Mapping[str, float]:
        """Roll out all rows under the published version, after step ``n``.

        Emits ``RolloutsFinished`` and ``EvaluationFinished``, and returns the metrics.
        """
        version = session.clock.published
        groups: list[Group] = []
        failed: list[FailedGroup] = []
        events = Events()  # its segments and tools are not part of the training run's metrics
        events.subscribe(session.events.emit, kinds=(Notice,))
        rollouts = session.for_evaluation(prefix=f"eval{version}-", temperature=self.temperature, events=events)

        async def run(index: int, row: Row) -> None:
            group = await rollouts.group(index, row, self.group_size)
            if isinstance(group, Group):
                groups.append(group)
            else:
                failed.append(group)

        async with anyio.create_task_group() as tasks:
            for index, row in enumerate(self.rows):
                tasks.start_soon(LazyCoroutine, run, index, row)
        if not groups:
            error = failed[0].error
            error.add_note(f"all {len(failed)} held-out rows failed, the first for this")
            raise error
        _tell_failures(groups, failed, session.events)
        if session.events.wants(RolloutsFinished):
            in_order = sorted(groups, key=lambda group: group.index)
            now = anyio.current_time()
            session.events.emit(RolloutsFinished(time=now, n=n, version=version, groups=in_order, evaluation=_NAME))
        found = measures(groups, group_size=self.group_size, pass_reward=self.pass_reward)
        metrics = {**found, "failed_rows": float(len(failed))}
        session.events.emit(EvaluationFinished(time=anyio.current_time(), version=version, metrics=metrics))
        return metrics


def _tell_failures(groups: Sequence[Group], failed: Sequence[FailedGroup], events: Events) -> None:
    """A warning with the first error, if rows or some of their trajectories failed: the means are without them."""
    errors = [group.error for group in failed]
    errors += [member.error for group in groups for member in group.members_G if member.error is not None]
    if errors:
        keys = {
            "failed_rows": len(failed),
            "rows": len(failed) + len(groups),
            "failed_members_of_others": len(errors) - len(failed),
            "error": error_text(errors[0]),
            "where": place_of(errors[0]),
        }
        now = anyio.current_time()
        events.emit(Notice(time=now, name="evaluation_failures", level="warning", keys=keys))
