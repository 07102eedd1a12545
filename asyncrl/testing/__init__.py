"""Public tools for tests: the virtual clock, a scripted model, and scripted samplers, learners and publishers."""

from __future__ import annotations

from asyncrl.testing.clock import Deadlock, VirtualClock, run_virtual
from asyncrl.testing.script import Asked, ScriptEnded, call
from asyncrl.testing.scripted import (
    END,
    ByteRenderer,
    ScriptedLearner,
    ScriptedPublisher,
    ScriptedSampler,
    heavy_tail,
    scripted_policy,
)
from asyncrl.testing.scriptedmodel import ScriptedModel

__all__ = [
    "END",
    "Asked",
    "ByteRenderer",
    "Deadlock",
    "ScriptEnded",
    "ScriptedLearner",
    "ScriptedModel",
    "ScriptedPublisher",
    "ScriptedSampler",
    "VirtualClock",
    "call",
    "heavy_tail",
    "run_virtual",
    "scripted_policy",
]
