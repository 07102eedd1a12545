"""What a resumed run must have in common with the one that was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from asyncrl.checkpoint.runfile import described, rows_digest
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.training.plan import TrainingPlan
from asyncrl.types import Row

__all__ = ["run_identity"]


def run_identity(plan: TrainingPlan, engine: RolloutEngine, rows: Sequence[Row]) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was stopped. Takes time for many rows."""
    options = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return described({**options, **engine.identity(), "rows": rows_digest(rows)})
