"""asyncrl: asynchronous reinforcement learning of language models, with a bound on policy age that always holds.

Names are loaded when they are first used, so that ``import asyncrl`` is quick and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# For type checkers and editors, which do not run __getattr__. tests/test_package.py keeps both lists equal.
if TYPE_CHECKING:
    from asyncrl.checkpoint.options import Checkpointing
    from asyncrl.errors import InfrastructureError
    from asyncrl.learning.advantages import Batchwise, GroupCentered
    from asyncrl.learning.losses import CISPO, PPO, DecoupledPPO, ImportanceSampling, PolicyGradient
    from asyncrl.learning.options import Adam, LoraConfig, cosine
    from asyncrl.learning.torch_learner import TorchLearner
    from asyncrl.publishing.policy import Policy
    from asyncrl.rollout.budget import Budget
    from asyncrl.rollout.engine import RolloutEngine
    from asyncrl.rollout.env import Env, TurnResult
    from asyncrl.rollout.failures import Failures
    from asyncrl.rollout.processes import in_process
    from asyncrl.rollout.tools import tool
    from asyncrl.sampling.sglang import SGLang
    from asyncrl.sampling.sources import DnsSource, FileSource
    from asyncrl.scheduling.rules import ForwardBackwardBatch, GroupCompletion, KVCache, Schedule, Truncation
    from asyncrl.servers.sglangcommand import SGLangOptions
    from asyncrl.training.evaluation import Evaluator
    from asyncrl.training.running import run
    from asyncrl.training.trainer import AsyncTrainer
    from asyncrl.types import Step, Trajectory

__all__ = [
    "CISPO",
    "PPO",
    "Adam",
    "AsyncTrainer",
    "Batchwise",
    "Budget",
    "Checkpointing",
    "DecoupledPPO",
    "DnsSource",
    "Env",
    "Evaluator",
    "Failures",
    "FileSource",
    "ForwardBackwardBatch",
    "GroupCentered",
    "GroupCompletion",
    "ImportanceSampling",
    "InfrastructureError",
    "KVCache",
    "LoraConfig",
    "Policy",
    "PolicyGradient",
    "RolloutEngine",
    "SGLang",
    "SGLangOptions",
    "Schedule",
    "Step",
    "TorchLearner",
    "Trajectory",
    "Truncation",
    "TurnResult",
    "cosine",
    "in_process",
    "run",
    "tool",
]

_MODULES = {
    "asyncrl.checkpoint.options": ("Checkpointing",),
    "asyncrl.rollout.engine": ("RolloutEngine",),
    "asyncrl.errors": ("InfrastructureError",),
    "asyncrl.training.evaluation": ("Evaluator",),
    "asyncrl.learning.advantages": ("Batchwise", "GroupCentered"),
    "asyncrl.learning.losses": ("CISPO", "PPO", "DecoupledPPO", "ImportanceSampling", "PolicyGradient"),
    "asyncrl.learning.options": ("Adam", "LoraConfig", "cosine"),
    "asyncrl.learning.torch_learner": ("TorchLearner",),
    "asyncrl.publishing.policy": ("Policy",),
    "asyncrl.rollout.budget": ("Budget",),
    "asyncrl.rollout.env": ("Env", "TurnResult"),
    "asyncrl.rollout.failures": ("Failures",),
    "asyncrl.rollout.processes": ("in_process",),
    "asyncrl.rollout.tools": ("tool",),
    "asyncrl.training.running": ("run",),
    "asyncrl.sampling.sglang": ("SGLang",),
    "asyncrl.servers.sglangcommand": ("SGLangOptions",),
    "asyncrl.sampling.sources": ("DnsSource", "FileSource"),
    "asyncrl.scheduling.rules": ("ForwardBackwardBatch", "GroupCompletion", "KVCache", "Schedule", "Truncation"),
    "asyncrl.training.trainer": ("AsyncTrainer",),
    "asyncrl.types": ("Step", "Trajectory"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # which would otherwise accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'asyncrl' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
