from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learning.losses import (
    CISPO,
    PPO,
    DecoupledPPO,
    ImportanceSampling,
    Loss,
    LossInputs,
    LossOutput,
    PolicyGradient,
    Proximal,
    loss_from,
)

ALL = (CISPO(), PPO(), DecoupledPPO(), ImportanceSampling(), PolicyGradient())


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One token: its log-probability now, at the step's start and at the sampler, and its advantage."""

    logp: float
    proximal: float
    mu: float
    advantage: float


POINTS = [
    Point(logp=logp, proximal=proximal, mu=mu, advantage=advantage)
    for logp, proximal, mu in [
        (-1.0, -1.0, -1.0),
        (-1.0, -1.1, -1.05),  # inside of every clip
        (-0.5, -1.0, -1.5),  # ratio 2.7
        (-2.0, -1.5, -1.0),  # ratio 0.37
        (-0.5, -1.0, -4.0),  # ratio 33, over every cap
        (-5.0, -4.0, -1.0),
    ]
    for advantage in (-0.7, 0.0, 1.3)
]
# Each formula in plain numbers: ``x`` is where the gradient goes, ``at`` where stop-gradient holds it.
FORMULAS: list[tuple[Loss, Callable[[float, Point], float]]] = [
    (CISPO(eps_max=2.0), lambda x, at: -min(math.exp(at.logp - at.mu), 2.0) * at.advantage * x),
    (PPO(clip_low=0.1, clip_high=0.3), lambda x, at: _clipped(math.exp(x - at.mu), at.advantage)),
    (
        DecoupledPPO(clip_low=0.1, clip_high=0.3, max_importance_weight=1.5),
        lambda x, at: min(math.exp(at.proximal - at.mu), 1.5) * _clipped(math.exp(x - at.proximal), at.advantage),
    ),
    (ImportanceSampling(), lambda x, at: -math.exp(x - at.mu) * at.advantage),
    (PolicyGradient(), lambda x, at: -at.advantage * x),
]


def _clipped(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)


def _evaluate(loss: Loss, *points: Point, dtype: torch.dtype = torch.float64) -> tuple[LossOutput, torch.Tensor]:
    """The output and the (N,) gradient to the log-probabilities."""
    logp, proximal, mu, advantages = torch.tensor(
        [[point.logp, point.proximal, point.mu, point.advantage] for point in points], dtype=dtype
    ).T
    logp = logp.clone().requires_grad_()
    output = loss.per_token(
        LossInputs(
            logprobs=logp,
            sampled_logprobs=mu,
            advantages=advantages,
            ages=torch.ones(len(points)),
            data={"proximal": proximal},
        )
    )
    (gradient,) = torch.autograd.grad(output.loss.sum(), logp)
    return output, gradient


def _diagnostic(loss: Loss, name: str, *points: Point) -> list[float]:
    output, _ = _evaluate(loss, *points)
    values: list[float] = output.diagnostics[name].tolist()
    return values


@pytest.mark.parametrize(("loss", "formula"), FORMULAS, ids=lambda value: type(value).__name__)
def test_value_and_gradient_are_the_formula_s(loss: Loss, formula: Callable[[float, Point], float]) -> None:
    """The value is the formula's, the gradient its finite difference, for ratios inside and outside of the clips.

    So that no correction is counted twice or not at all.
    """
    step = 1e-6
    output, gradient = _evaluate(loss, *POINTS)
    for point, value, slope in zip(POINTS, output.loss.tolist(), gradient.tolist(), strict=True):
        difference = formula(point.logp + step, point) - formula(point.logp - step, point)
        assert value == pytest.approx(formula(point.logp, point)), point
        assert slope == pytest.approx(difference / (2 * step), abs=1e-7), point


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize(("logp", "mu"), [(-1.0, -100.0), (-1.0, -3e38), (-1.0, -math.inf), (-100.0, -1.0)])
def test_a_token_that_one_side_thought_impossible_stays_finite(loss: Loss, logp: float, mu: float) -> None:
    """A log-ratio of 99 or of infinity gives a large loss and gradient, for either sign, but no overflow."""
    points = [Point(logp=logp, proximal=logp, mu=mu, advantage=advantage) for advantage in (-1.0, 0.0, 1.0)]
    output, gradient = _evaluate(loss, *points, dtype=torch.float32)
    assert output.loss.dtype == torch.float32
    for values in (output.loss, gradient, *output.diagnostics.values()):
        assert values.isfinite().all()


def test_on_policy_all_losses_have_the_policy_gradient() -> None:
    """Ratio 1: every correction is silent."""
    point = Point(logp=-1.0, proximal=-1.0, mu=-1.0, advantage=0.7)
    for loss in ALL:
        assert _evaluate(loss, point)[1].item() == pytest.approx(-0.7), loss


def test_cispo_keeps_a_gradient_where_ppo_clips_it_away() -> None:
    """What makes it CISPO: a capped weight instead of no gradient."""
    stale = Point(logp=-0.5, proximal=-0.5, mu=-4.0, advantage=1.0)
    assert _evaluate(PPO(), stale)[1].item() == 0.0
    assert _evaluate(CISPO(), stale)[1].item() == pytest.approx(-6.0)


def test_the_behaviour_weight_bounds_a_negative_advantage() -> None:
    """Stale data with A < 0: plain PPO has no bound there, the cap of the decoupled weight is one."""
    stale = Point(logp=-1.0, proximal=-1.0, mu=-9.0, advantage=-1.0)
    assert _evaluate(PPO(), stale)[0].loss.item() == pytest.approx(math.exp(8))
    assert _evaluate(DecoupledPPO(), stale)[0].loss.item() == pytest.approx(5.0)
    assert _diagnostic(DecoupledPPO(), "behaviour_weight", stale) == [5.0]
    assert _diagnostic(DecoupledPPO(), "behaviour_capped_frac", stale) == [1.0]


def test_ratio_and_kl_are_those_of_learner_and_sampler() -> None:
    """For every loss, the decoupled one included, whose own ratio is to the proximal policy."""
    point = Point(logp=-1.0, proximal=-1.0, mu=-1.5, advantage=1.0)
    for loss in ALL:
        assert _diagnostic(loss, "ratio", point) == pytest.approx([math.exp(0.5)]), loss
        assert _diagnostic(loss, "kl", point) == pytest.approx([math.exp(0.5) - 1 - 0.5]), loss


def test_clipped_tokens_are_counted() -> None:
    """Only where the clip changes the gradient: not for a large ratio with A < 0."""
    ratios_and_signs = [(1.0, 1.0), (0.5, 1.0), (0.5, -1.0), (2.0, 1.0), (2.0, -1.0), (9.0, -1.0)]
    points = [
        Point(logp=-1.0 + math.log(ratio), proximal=-1.0, mu=-1.0, advantage=sign) for ratio, sign in ratios_and_signs
    ]
    assert _diagnostic(PPO(), "clipped_frac", *points) == [0, 0, 1, 1, 0, 0]
    assert _diagnostic(DecoupledPPO(), "clipped_frac", *points) == [0, 0, 1, 1, 0, 0]
    assert _diagnostic(CISPO(), "clipped_frac", *points) == [0, 0, 0, 0, 0, 1]


def test_diagnostics_carry_no_gradient() -> None:
    """They would keep the graph of the whole pass alive."""
    for loss in ALL:
        output, _ = _evaluate(loss, POINTS[0])
        assert not any(values.requires_grad for values in output.diagnostics.values()), loss


def test_only_the_decoupled_loss_needs_the_proximal_policy() -> None:
    """And it says so instead of training without."""
    assert [loss.token_data for loss in ALL] == [(), (), (Proximal(),), (), ()]
    zero = torch.zeros(1)
    with pytest.raises(KeyError, match="proximal"):
        DecoupledPPO().per_token(LossInputs(logprobs=zero, sampled_logprobs=zero, advantages=zero, ages=zero))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cispo", CISPO),
        ("ppo", PPO),
        ("decoupled_ppo", DecoupledPPO),
        ("importance_sampling", ImportanceSampling),
        ("policy_gradient", PolicyGradient),
    ],
)
def test_losses_have_names(name: str, kind: type) -> None:
    """The name alone gives the defaults."""
    assert loss_from(name) == kind()


def test_options_of_a_named_loss() -> None:
    """Options go into the object; an object of the user's own is taken as it is."""
    assert loss_from("cispo", eps_max=3.0) == CISPO(eps_max=3.0)
    loss = PPO()
    assert loss_from(loss) is loss


def test_unknown_names_and_options_are_refused() -> None:
    """The message has the nearest known one."""
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        loss_from("cipso")
    with pytest.raises(ConfigError, match="did you mean 'clip_low'"):
        loss_from("ppo", clip_lo=0.1)
    with pytest.raises(ConfigError, match=r"loss\.eps_max is '6'"):
        loss_from("cispo", eps_max="6")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="go into the loss object"):
        loss_from(PPO(), clip_low=0.1)


def test_wrong_numbers_are_refused() -> None:
    """Each message names its option."""
    wrong: list[tuple[Callable[[], Loss], str]] = [
        (lambda: CISPO(eps_max=0.0), "eps_max"),
        (lambda: CISPO(eps_max=math.nan), "eps_max"),
        (lambda: PPO(clip_low=1.0), "clip_low"),
        (lambda: DecoupledPPO(clip_high=-0.1), "clip_high"),
        (lambda: DecoupledPPO(max_importance_weight=math.inf), "max_importance_weight"),
    ]
    for make, option in wrong:
        with pytest.raises(ConfigError, match=rf"loss\.{option} is"):
            make()
