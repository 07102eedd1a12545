"""Policy losses, one file for each or for a family, and what their sum over a step is divided by.

A new loss is one more file, and its class in ``choosing``. Left out: an entropy bonus.
"""

from asyncrl.learning.losses.base import (
    Loss,
    LossInputs,
    LossOutput,
    Proximal,
    Reference,
    ScoringModel,
    TokenData,
)
from asyncrl.learning.losses.choosing import loss_from, loss_kinds
from asyncrl.learning.losses.cispo import CISPO
from asyncrl.learning.losses.normalize import Divisor, Normalize, token_weight
from asyncrl.learning.losses.policygradient import ImportanceSampling, PolicyGradient
from asyncrl.learning.losses.ppo import PPO, DecoupledPPO

__all__ = [
    "CISPO",
    "PPO",
    "DecoupledPPO",
    "Divisor",
    "ImportanceSampling",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Normalize",
    "PolicyGradient",
    "Proximal",
    "Reference",
    "ScoringModel",
    "TokenData",
    "loss_from",
    "loss_kinds",
    "token_weight",
]
