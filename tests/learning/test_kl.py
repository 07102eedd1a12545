"""The penalty on the distance to the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learning.losses import (
    CISPO,
    Correction,
    DecoupledPPO,
    KLPenalty,
    LossInputs,
    PolicyGradient,
    Proximal,
    Reference,
    compose,
)
from tests.learning.lossinputs import evaluate, loss_inputs

LOGITS = st.lists(st.floats(-1, 1), min_size=3, max_size=3)


def _estimates(kind: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@settings(max_examples=20)
@given(now=LOGITS, then=LOGITS, reference=LOGITS)
def test_in_the_loss_the_mean_gradient_is_that_of_the_divergence(
    kind: Any, now: list[float], then: list[float], reference: list[float]
) -> None:
    """Every estimate, over all tokens with the probability that the sampler had for them: no bias by its age.

    Without the weight it is 0 for k1, and that of the other direction for k3.
    """
    logits = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, 0)
    mu, ref = (torch.log_softmax(torch.tensor(one, dtype=torch.float64), 0) for one in (then, reference))
    inputs = LossInputs(
        logprobs=logp,
        sampled_logprobs=mu,
        advantages=torch.zeros(3, dtype=torch.float64),
        ages=torch.ones(3),
        tokens_B=[1, 1, 1],
        data={"reference": ref},
    )
    penalty = KLPenalty(coefficient=0.5, kind=kind, max_importance_weight=1e6)
    output = compose(PolicyGradient(), correction=None, kl=penalty).per_token(inputs)
    (found,) = torch.autograd.grad((mu.exp() * output.loss).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(0.5 * (logp.exp() * (logp - ref)).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_are_their_formulas(kind: Any) -> None:
    """Reported as they are, whatever the weight."""
    inputs = loss_inputs([-1.0, -2.0], [-1.0, -1.0], [1.0, 1.0], reference=[-1.3, -1.1])
    loss = compose(PolicyGradient(), correction=None, kl=KLPenalty(coefficient=0.0, kind=kind))
    output, gradient = evaluate(loss, inputs)
    assert output.diagnostics["reference_kl"].tolist() == pytest.approx([_estimates(kind, d) for d in (0.3, -0.9)])
    assert not output.diagnostics["reference_kl"].requires_grad
    assert gradient == [-1.0, -1.0]  # a coefficient of 0 measures


def test_the_weight_is_capped() -> None:
    """A token that the sampler thought unlikely does not own the penalty."""
    inputs = loss_inputs([-1.0], [-9.0], [0.0], reference=[-1.5])
    for kind, slope in (("k1", 5.0), ("k2", 5.0 * 0.5), ("k3", 5.0 * (1 - math.exp(-0.5)))):
        penalty = KLPenalty(coefficient=1.0, kind=kind)  # type: ignore[arg-type]
        assert evaluate(compose(CISPO(), correction=None, kl=penalty), inputs)[1] == pytest.approx([slope])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_in_the_reward_it_is_part_of_the_advantage(kind: Any) -> None:
    """Without gradient of its own: A - c k."""
    inputs = loss_inputs([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0], reference=[-1.3, -1.1])
    loss = compose(CISPO(), correction=None, kl=KLPenalty(coefficient=0.5, kind=kind, where="reward"))
    assert evaluate(loss, inputs)[1] == pytest.approx([-(1 - 0.5 * _estimates(kind, d)) for d in (0.3, -0.9)])


def test_a_masked_token_is_not_penalised() -> None:
    """Neither in the loss nor in the reward, also if its reference is no number; the others are."""
    inputs = loss_inputs([-1.0, -1.0], [-1.0, -9.0], [1.0, 1.0], reference=[-1.3, math.nan])
    for where in ("loss", "reward"):
        penalty = KLPenalty(coefficient=0.5, where=where)
        output, gradient = evaluate(compose(PolicyGradient(), correction=Correction(token="mask"), kl=penalty), inputs)
        assert gradient[1] == 0.0
        assert math.isfinite(gradient[0]) and gradient[0] != -1.0
        assert output.diagnostics["reference_kl"].isfinite().all()


def test_the_correction_s_weight_is_not_the_penalty_s() -> None:
    """Which has one of its own: the policy's part is halved, and the penalty is as it was."""
    inputs = loss_inputs([-1.0], [-1.0 + math.log(2.0)], [1.0], reference=[-1.2])
    penalty = KLPenalty(coefficient=1.0, kind="k3")
    bare = evaluate(compose(PolicyGradient(), correction=None, kl=penalty), inputs)[1][0]
    weighted = evaluate(compose(PolicyGradient(), correction=Correction(token="truncate"), kl=penalty), inputs)[1][0]
    assert weighted == pytest.approx(bare + 0.5)


def test_the_reference_is_asked_for_once() -> None:
    """Beside what the loss asks for."""
    penalty = KLPenalty(coefficient=0.1)
    composed = compose(DecoupledPPO(), correction=None, kl=penalty)
    assert composed.token_data == (Proximal(), Reference())
    assert compose(composed, correction=None, kl=penalty).token_data == (Proximal(), Reference())


def test_wrong_options_are_refused() -> None:
    """Each message names its option."""
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: KLPenalty(coefficient=-0.1), "coefficient"),
        (lambda: KLPenalty(coefficient=0.1, kind="k4"), "kind"),  # type: ignore[arg-type]
        (lambda: KLPenalty(coefficient=0.1, where="both"), "where"),  # type: ignore[arg-type]
        (lambda: KLPenalty(coefficient=0.1, max_importance_weight=0.0), "max_importance_weight"),
    ]
    for make, option in wrong:
        with pytest.raises(ConfigError, match=rf"kl\.{option} is"):
            make()
