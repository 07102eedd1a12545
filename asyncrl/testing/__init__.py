"""Public tools for tests: the virtual clock and scripted samplers, learners and publishers."""

from __future__ import annotations

from asyncrl.testing.clock import Deadlock, VirtualClock, run_virtual
from asyncrl.testing.scripted import (
    END,
    ByteRenderer,
    ScriptedLearner,
    ScriptedPublisher,
    ScriptedSampler,
    heavy_tail,
    scripted_policy,
)

__all__ = [
    "END",
    "ByteRenderer",
    "Deadlock",
    "ScriptedLearner",
    "ScriptedPublisher",
    "ScriptedSampler",
    "VirtualClock",
    "heavy_tail",
    "run_virtual",
    "scripted_policy",
]
