"""Where the public names are: read by type checkers, and by ``__init__.py`` when a name is first used."""

from .checkpoint.options import Checkpointing
from .errors import InfrastructureError
from .learning.advantages import Batchwise, GroupCentered, LeaveOneOut, MaxRL, ReinforcePlusPlus
from .learning.losses import (
    CISPO,
    DPPO,
    GSPO,
    PPO,
    SAPO,
    Correction,
    DecoupledPPO,
    GeometricMean,
    IcePop,
    ImportanceSampling,
    KLPenalty,
    PolicyGradient,
)
from .learning.modelfolder import find_model
from .learning.options import Adam, LoraConfig, constant, cosine, linear
from .learning.overlong import OverlongPenalty
from .learning.torch_learner import TorchLearner
from .publishing.policy import Policy
from .rollout.budget import Budget
from .rollout.engine import RolloutEngine
from .rollout.env import Env, TurnResult
from .rollout.failures import Failures
from .rollout.processes import in_process
from .rollout.rowfiles import load_rows
from .rollout.tools import tool
from .sampling.sglang import SGLang
from .sampling.sources import DnsSource, FileSource
from .scheduling.rules import ForwardBackwardBatch, GroupCompletion, KVCache, Schedule, Truncation
from .servers.sglangcommand import SGLangOptions
from .training.evaluation import Evaluator
from .training.running import run
from .training.trainer import AsyncTrainer
from .types import Step, Trajectory

__version__: str
"""Of the installed package."""

__all__ = [
    "CISPO",
    "DPPO",
    "GSPO",
    "PPO",
    "SAPO",
    "Adam",
    "AsyncTrainer",
    "Batchwise",
    "Budget",
    "Checkpointing",
    "Correction",
    "DecoupledPPO",
    "DnsSource",
    "Env",
    "Evaluator",
    "Failures",
    "FileSource",
    "ForwardBackwardBatch",
    "GeometricMean",
    "GroupCentered",
    "GroupCompletion",
    "IcePop",
    "ImportanceSampling",
    "InfrastructureError",
    "KLPenalty",
    "KVCache",
    "LeaveOneOut",
    "LoraConfig",
    "MaxRL",
    "OverlongPenalty",
    "Policy",
    "PolicyGradient",
    "ReinforcePlusPlus",
    "RolloutEngine",
    "SGLang",
    "SGLangOptions",
    "Schedule",
    "Step",
    "TorchLearner",
    "Trajectory",
    "Truncation",
    "TurnResult",
    "constant",
    "cosine",
    "find_model",
    "in_process",
    "linear",
    "load_rows",
    "run",
    "tool",
]
