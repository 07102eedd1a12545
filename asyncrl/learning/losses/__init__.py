"""Policy losses, one file for each or for a family, what stands beside them, and what their sum is divided by.

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
from asyncrl.learning.losses.composing import ComposedLoss, compose
from asyncrl.learning.losses.correction import Correction
from asyncrl.learning.losses.dppo import DPPO
from asyncrl.learning.losses.geometric import GeometricMean
from asyncrl.learning.losses.gspo import GSPO
from asyncrl.learning.losses.icepop import IcePop
from asyncrl.learning.losses.kl import KLPenalty
from asyncrl.learning.losses.normalize import Divisor, Normalize, token_weight
from asyncrl.learning.losses.policygradient import ImportanceSampling, PolicyGradient
from asyncrl.learning.losses.ppo import PPO, DecoupledPPO
from asyncrl.learning.losses.sapo import SAPO

__all__ = [
    "CISPO",
    "DPPO",
    "GSPO",
    "PPO",
    "SAPO",
    "ComposedLoss",
    "Correction",
    "DecoupledPPO",
    "Divisor",
    "GeometricMean",
    "IcePop",
    "ImportanceSampling",
    "KLPenalty",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Normalize",
    "PolicyGradient",
    "Proximal",
    "Reference",
    "ScoringModel",
    "TokenData",
    "compose",
    "loss_from",
    "loss_kinds",
    "token_weight",
]
