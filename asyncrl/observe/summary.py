"""What the last line of a run says, collected from its events."""

from __future__ import annotations

import math
import statistics

from asyncrl.events import EvaluationFinished, Event, StepFinished

__all__ = ["RunSummary"]


class RunSummary:
    """Collects from the events of a run what its last line says; subscribe ``observe``."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._heldout: list[float] = []
        self._max_age = 0.0
        self._versions = 0

    def observe(self, event: Event) -> None:
        """Take note of ``event``."""
        match event:
            case StepFinished():
                self._versions = event.model_step
                self._rewards.append(event.metrics.get("reward/mean", math.nan))
                self._max_age = max(self._max_age, event.metrics.get("staleness/span_age_max", 0.0))
            case EvaluationFinished():
                self._heldout.append(event.metrics.get("reward_mean", math.nan))

    def summary(self) -> dict[str, object]:
        """``reward_first`` and ``reward_last`` are means over the first and last fifth of the steps."""
        summary: dict[str, object] = {
            "steps": len(self._rewards),
            "versions": self._versions,
            "max_age": int(self._max_age),
        }
        if self._rewards:
            fifth = math.ceil(len(self._rewards) / 5)
            summary["reward_first"] = statistics.fmean(self._rewards[:fifth])
            summary["reward_last"] = statistics.fmean(self._rewards[-fifth:])
        if self._heldout:
            summary["heldout_first"] = self._heldout[0]
            summary["heldout_last"] = self._heldout[-1]
        return summary
