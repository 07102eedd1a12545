"""Every loss against its formula in plain numbers, by finite differences in the logits of a small categorical policy.

``x`` is where the gradient goes; what a stop-gradient holds is computed at ``at``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learning.losses import (
    CISPO,
    DPPO,
    GSPO,
    PPO,
    SAPO,
    DecoupledPPO,
    GeometricMean,
    IcePop,
    ImportanceSampling,
    Loss,
    LossInputs,
    PolicyGradient,
    loss_kinds,
)

VOCABULARY = 3
STEP = 1e-6
# Ratios near a bound of a clip have no derivative there: a drawn point this near to one is passed over.
KINK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Its log-probabilities where the gradient is taken, at the step's start, at the sampler; and the rest."""

    logp: float
    proximal: float
    mu: float
    advantage: float
    age: int

    @property
    def r(self) -> float:
        return math.exp(self.logp - self.mu)


Formula = Callable[[list[float], list[Token]], list[float]]
"""Log-probabilities of a sequence's tokens, and the tokens where stop-gradient holds them, to their losses."""


def _each(loss: Callable[[float, Token], float]) -> Formula:
    return lambda x, at: [loss(value, token) for value, token in zip(x, at, strict=True)]


def _clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def _surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, _clip(ratio, 1 - low, 1 + high) * advantage)


def _ppo(x: float, at: Token) -> float:
    surrogate = _surrogate(math.exp(x - at.mu), at.advantage, 0.1, 0.3)
    return -max(surrogate, 2.0 * at.advantage) if at.advantage < 0 else -surrogate


def _decoupled(x: float, at: Token) -> float:
    weight = min(math.exp(at.proximal - at.mu), 1.5)
    return -weight * _surrogate(math.exp(x - at.proximal), at.advantage, 0.1, 0.3)


def _loglinear(x: float, at: Token) -> float:
    # Two updates since the step's start, see ``_inputs``.
    proximal = at.mu + at.age / (at.age + 2) * (at.logp - at.mu)
    weight = min(math.exp(proximal - at.mu), 1.5)
    return -weight * _surrogate(math.exp(x - proximal), at.advantage, 0.1, 0.3)


def _gspo(x: list[float], at: list[Token]) -> list[float]:
    s = math.exp(sum(token.logp - token.mu for token in at) / len(at))
    return [
        -_surrogate(s * math.exp(value - token.logp), token.advantage, 0.2, 0.3)
        for value, token in zip(x, at, strict=True)
    ]


def _geometric(x: list[float], at: list[Token]) -> list[float]:
    def clipped(value: float, token: Token) -> float:
        raw = value - token.mu
        return min(raw, 0.4) if token.advantage >= 0 else max(raw, -0.3)

    mean = sum(clipped(token.logp, token) for token in at) / len(at)
    return [
        -token.advantage * math.exp(mean + clipped(value, token) - clipped(token.logp, token))
        for value, token in zip(x, at, strict=True)
    ]


def _dppo(divergence: Callable[[float, float], float], delta: float) -> Formula:
    def loss(x: float, at: Token) -> float:
        further = at.logp > at.mu if at.advantage > 0 else at.logp < at.mu
        masked = further and divergence(math.exp(at.logp), math.exp(at.mu)) > delta
        return 0.0 if masked else -min(at.r, 3.0) * at.advantage * x

    return _each(loss)


def _kl(p: float, q: float) -> float:
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def _sapo(x: float, at: Token) -> float:
    tau = 1.0 if at.advantage > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(x - at.mu) - 1))) * at.advantage


def _icepop(x: float, at: Token) -> float:
    return -at.r * at.advantage * x if 0.5 <= at.r <= 2.0 else 0.0


FORMULAS: list[tuple[Loss, Formula]] = [
    (CISPO(eps_max=2.0), _each(lambda x, at: -min(at.r, 2.0) * at.advantage * x)),
    (PPO(clip_low=0.1, clip_high=0.3, dual_clip=2.0), _each(_ppo)),
    (DecoupledPPO(clip_low=0.1, clip_high=0.3, max_importance_weight=1.5), _each(_decoupled)),
    (
        DecoupledPPO(clip_low=0.1, clip_high=0.3, max_importance_weight=1.5, proximal="loglinear"),
        _each(_loglinear),
    ),
    (GSPO(clip_low=0.2, clip_high=0.3), _gspo),
    (GeometricMean(clip_low=0.3), _geometric),
    (DPPO(eps_max=3.0), _dppo(lambda p, q: abs(p - q), 0.2)),
    (DPPO(divergence="kl", eps_max=3.0), _dppo(_kl, 0.05)),
    (IcePop(high=2.0), _each(_icepop)),
    (SAPO(), _each(_sapo)),
    (ImportanceSampling(), _each(lambda x, at: -math.exp(x - at.mu) * at.advantage)),
    (PolicyGradient(), _each(lambda x, at: -at.advantage * x)),
]
BOUNDS = (0.7, 0.8, 0.9, 1.3, 1.5, 2.0, 3.0, math.exp(0.4), math.exp(-0.3), 0.5)

_Drawn: TypeAlias = tuple[list[float], list[float], list[float], int, float, int]
LOGITS = st.lists(st.floats(-2, 2), min_size=VOCABULARY, max_size=VOCABULARY)
TOKENS = st.tuples(
    LOGITS, LOGITS, LOGITS, st.integers(0, VOCABULARY - 1), st.sampled_from([-0.7, 0.0, 1.3]), st.integers(0, 3)
)


def _logp(logits: Sequence[float], token: int) -> float:
    return logits[token] - math.log(sum(map(math.exp, logits)))


def _inputs(logprobs: torch.Tensor, tokens: Sequence[Token], tokens_B: Sequence[int]) -> LossInputs:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float64)

    return LossInputs(
        logprobs=logprobs,
        sampled_logprobs=column("mu"),
        advantages=column("advantage"),
        ages=column("age").int(),
        tokens_B=tokens_B,
        updates=2,
        data={"proximal": column("proximal")},
    )


def _smooth(tokens: Sequence[Token]) -> bool:
    """No ratio that a loss looks at is at a kink."""
    mean = math.exp(sum(token.logp - token.mu for token in tokens) / len(tokens))
    ratios = [mean]
    for token in tokens:
        alpha = token.age / (token.age + 2)
        ratios += [token.r, math.exp(token.logp - token.proximal), token.r**alpha, token.r ** (1 - alpha)]
        ratios.append(math.exp(token.proximal - token.mu))
    return all(abs(ratio - bound) > KINK for ratio in ratios for bound in BOUNDS)


def test_every_loss_has_a_formula() -> None:
    """A new one is put into the table."""
    assert {type(loss) for loss, _ in FORMULAS} == set(loss_kinds().values())


@pytest.mark.parametrize(("loss", "formula"), FORMULAS, ids=[repr(loss) for loss, _ in FORMULAS])
@settings(max_examples=25)
@given(drawn=st.lists(TOKENS, min_size=3, max_size=5))
def test_value_and_gradient_are_the_formula_s(loss: Loss, formula: Formula, drawn: list[_Drawn]) -> None:
    """For known mu, p and pi, inside and outside of the clips: no correction is counted twice or not at all.

    Two sequences; the gradient to the policy's logits, of all tokens, by central differences of the formula.
    """
    logits = torch.tensor([one[0] for one in drawn], dtype=torch.float64, requires_grad=True)
    chosen = [one[3] for one in drawn]
    tokens = [
        Token(logp=_logp(now, token), proximal=_logp(start, token), mu=_logp(then, token), advantage=advantage, age=age)
        for now, start, then, token, advantage, age in drawn
    ]
    parts = [tokens[:1], tokens[1:]]
    if not all(map(_smooth, parts)):
        return
    rows = torch.arange(len(drawn))
    logprobs = torch.log_softmax(logits, -1)[rows, torch.tensor(chosen)]
    output = loss.per_token(_inputs(logprobs, tokens, [1, len(tokens) - 1]))
    (gradient,) = torch.autograd.grad(output.loss.sum(), logits)

    def total(moved: list[list[float]]) -> float:
        x = [_logp(row, token) for row, token in zip(moved, chosen, strict=True)]
        return sum(formula(x[:1], parts[0])) + sum(formula(x[1:], parts[1]))

    start = logits.tolist()
    assert float(output.loss.detach().sum()) == pytest.approx(total(start), abs=1e-9)
    for row in range(len(drawn)):
        for column in range(VOCABULARY):
            up, down = [list(one) for one in start], [list(one) for one in start]
            up[row][column] += STEP
            down[row][column] -= STEP
            slope = (total(up) - total(down)) / (2 * STEP)
            assert float(gradient[row, column]) == pytest.approx(slope, abs=1e-6, rel=1e-5)
