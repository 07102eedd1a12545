"""How long does the trainer wait, beside the best schedule there is; and what does it bring that a queue does not age?

The real trainer and engine on the virtual clock (``workloads.py``), so these figures do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from asyncrl.scheduling.admission import Admission
from asyncrl.training import run as trainingrun
from benchmarks.answer import Answer
from benchmarks.clairvoyant import earliest_end
from benchmarks.workloads import WORKLOADS, run

__all__ = ["binding_answers", "idle_answers"]

_MOST_IDLE = 1.05
_NEVER_IDLE = 0.01


def idle_answers() -> Iterator[Answer]:
    """The trainer's idle share on every workload, over that of the earliest possible end of the same trace."""
    for workload in WORKLOADS:
        outcome = run(workload)
        trace = workload.trace()
        best_end_s = earliest_end(trace)
        best_idle = 1 - outcome.busy_s / best_end_s
        if best_idle < _NEVER_IDLE:
            # A ratio of two numbers near zero says nothing: compare the ends.
            figure, anchor_figure, unit = (
                outcome.end_s,
                best_end_s,
                "virtual seconds in all (the optimum is never idle)",
            )
        else:
            figure, anchor_figure, unit = outcome.idle, best_idle, "share of the time"
        yield Answer(
            question=f"trainer idle, {workload.name}, S={workload.max_staleness}",
            figure=figure,
            unit=unit,
            anchor="bound on every schedule" if trace.queues else "clairvoyant optimum",
            anchor_figure=anchor_figure,
            ratio=figure / anchor_figure,
            goal=f"ratio at most {_MOST_IDLE}",
            meets_goal=figure <= _MOST_IDLE * anchor_figure,
        )


class _EarlyBound(Admission):
    """Gives a group its due step when it is admitted, as if it were born then; births are ignored."""

    _published = 0

    def admit_nowait(self) -> int | None:
        """See ``Admission``."""
        group = super().admit_nowait()
        if group is not None:
            self.birth(group, self._published)
        return group

    def published(self, version: int) -> None:
        """See ``Admission``."""
        self._published = version
        super().published(version)


def binding_answers() -> Iterator[Answer]:
    """Speed and waits at the barrier with due steps from birth, over those with due steps from admission."""
    for workload in WORKLOADS:
        if not workload.trace().queues:
            continue
        late = run(workload)
        with patch.object(trainingrun, "Admission", _EarlyBound):
            early = run(workload)
        question = f"{workload.name}, S={workload.max_staleness}: due steps from birth, mean wait at the barrier "
        question += f"{late.barrier_s / workload.steps:.3g} s (from admission {early.barrier_s / workload.steps:.3g} s)"
        speed, anchor_speed = (workload.steps / outcome.end_s * 3600 for outcome in (late, early))
        yield Answer(
            question=question,
            figure=speed,
            unit="steps per virtual hour",
            anchor="due steps from admission",
            anchor_figure=anchor_speed,
            ratio=speed / anchor_speed,
            goal="ratio at least 1",
            meets_goal=speed >= anchor_speed,
        )
