"""The off-policy correction beside a loss: what it keeps, weighs and refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.learning.losses import (
    CISPO,
    GSPO,
    ComposedLoss,
    Correction,
    DecoupledPPO,
    Loss,
    LossInputs,
    PolicyGradient,
    compose,
    loss_kinds,
)
from tests.learning.lossinputs import evaluate, loss_inputs

ALL = tuple(kind() for kind in loss_kinds().values())
INF = math.inf


def _inputs(ratios: Sequence[float], tokens_B: Sequence[int] | None = None) -> LossInputs:
    mu = [-3.0] * len(ratios)
    logp = [-3.0 + math.log(ratio) for ratio in ratios]
    return loss_inputs(logp, mu, [1.0] * len(ratios), tokens_B=tokens_B, proximal=logp)


def _gradient(correction: Correction, inputs: LossInputs, loss: Loss | None = None) -> list[float]:
    return evaluate(compose(loss or PolicyGradient(), correction=correction, kl=None), inputs)[1]


def test_tokens_are_truncated() -> None:
    """The weight of a token is its ratio, between the bounds: REINFORCE becomes truncated importance sampling."""
    correction = Correction(token="truncate", token_low=0.5)
    output, gradient = evaluate(compose(PolicyGradient(), correction=correction, kl=None), _inputs([0.1, 1.5, 9.0]))
    assert gradient == pytest.approx([-0.5, -1.5, -2.0])
    assert output.diagnostics["truncated_frac"].tolist() == [1, 0, 1]
    assert output.diagnostics["masked_frac"].tolist() == [0, 0, 0]


def test_tokens_are_masked() -> None:
    """Outside of the bounds there is no gradient, and inside it is the loss's own."""
    correction = Correction(token="mask", token_low=0.5)
    assert _gradient(correction, _inputs([0.1, 1.5, 9.0])) == pytest.approx([0.0, -1.0, 0.0])
    assert _gradient(correction, _inputs([0.1, 1.5, 9.0]), CISPO()) == pytest.approx([0.0, -1.5, 0.0])


def test_the_ratio_of_a_sequence_is_a_mean() -> None:
    """200 tokens that are each 2 % likelier are no outlier; their product is 52, and is asked for by name."""
    inputs = _inputs([1.02] * 200 + [3.0], [200, 1])
    geometric = _gradient(Correction(sequence="mask"), inputs)
    assert geometric == pytest.approx([-1.0] * 200 + [0.0])
    product = _gradient(Correction(sequence="mask", sequence_ratio="product", sequence_high=51.0), inputs)
    assert product == pytest.approx([0.0] * 200 + [-1.0])
    weighted = _gradient(Correction(sequence="truncate", sequence_ratio="product", sequence_high=100.0), inputs)
    assert weighted == pytest.approx([-(1.02**200)] * 200 + [-3.0])


def test_one_outlier_drops_its_sequence() -> None:
    """And no other one; its tokens are counted."""
    correction = Correction(veto_low=1e-4, veto_high=100.0)
    output, gradient = evaluate(
        compose(PolicyGradient(), correction=correction, kl=None), _inputs([1.0, 1e-5, 1.0, 2.0, 101.0], [3, 1, 1])
    )
    assert gradient == pytest.approx([0.0, 0.0, 0.0, -1.0, 0.0])
    assert output.diagnostics["vetoed_frac"].tolist() == [1, 1, 1, 0, 1]


def test_a_masked_token_is_in_no_sequence_ratio() -> None:
    """GSPO of what is left: the ratio is that of the first token alone."""
    inputs = _inputs([1.0, 50.0])
    output, gradient = evaluate(compose(GSPO(), correction=Correction(token="mask"), kl=None), inputs)
    assert gradient == pytest.approx([-1.0, 0.0])
    assert output.diagnostics["sequence_ratio"].tolist() == pytest.approx([1.0, 0.0])
    # Those that every loss has are of all tokens.
    assert output.diagnostics["ratio"].tolist() == pytest.approx([1.0, 50.0])


def test_a_proximal_policy_is_what_is_judged_where_the_loss_has_one() -> None:
    """What moved since the step's start is the trust region's business."""
    inputs = loss_inputs([-1.0], [-3.0], [1.0], proximal=[-3.0])
    assert _gradient(Correction(token="mask"), inputs, DecoupledPPO(clip_high=99.0)) != [0.0]
    assert _gradient(Correction(token="mask"), inputs, CISPO()) != [0.0]
    assert _gradient(Correction(token="mask"), loss_inputs([-1.0], [-3.0], [1.0]), CISPO()) == [0.0]


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
@pytest.mark.parametrize(("logp", "mu"), [(-1.0, math.nan), (-1.0, -INF), (-INF, -1.0), (math.nan, -1.0)])
def test_what_is_no_number_at_a_masked_token_reaches_no_gradient(loss: Loss, logp: float, mu: float) -> None:
    """On either side, with every loss: the others are trained as if it was not there."""
    inputs = loss_inputs([-1.0, logp], [-1.0, mu], [1.0, 1.0], proximal=[-1.0, logp])
    correction = Correction(token="mask", token_low=0.1, token_high=10.0)
    output, gradient = evaluate(compose(loss, correction=correction, kl=None), inputs)
    assert gradient == pytest.approx([-1.0, 0.0])
    assert output.loss.isfinite().all()


@pytest.mark.parametrize("mu", [math.nan, -INF])
@pytest.mark.parametrize("ratio", ["geometric", "product"])
def test_a_weight_that_is_no_number_is_not_used(mu: float, ratio: Any) -> None:
    """One token without a ratio leaves its sequence without one; the other sequence is trained."""
    inputs = loss_inputs([-1.0, -1.0, -1.0], [-1.0, mu, -1.0], [1.0, 1.0, 1.0], tokens_B=[2, 1])
    gradient = _gradient(Correction(sequence="truncate", sequence_ratio=ratio), inputs)
    assert gradient == pytest.approx([0.0, 0.0, -1.0] if math.isnan(mu) else [-2.0, -2.0, -1.0])


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_a_pass_whose_tokens_are_all_masked_can_be_trained(loss: Loss) -> None:
    """Its gradient is 0, and there is one."""
    assert _gradient(Correction(token="mask"), _inputs([9.0, 9.0, 9.0], [2, 1]), loss) == [0.0, 0.0, 0.0]


@given(st.lists(st.floats(0.01, 50.0), min_size=3, max_size=6), st.sampled_from(ALL))
def test_without_a_bound_nothing_is_changed(ratios: list[float], loss: Loss) -> None:
    """Masks that are never met leave a loss as it is, in value and gradient."""
    inputs = _inputs(ratios, [1, len(ratios) - 1])
    bare, gradient = evaluate(loss, inputs)
    correction = Correction(token="mask", token_high=1e3, sequence="mask", sequence_high=1e3, veto_high=1e3)
    output, corrected = evaluate(compose(loss, correction=correction, kl=None), inputs)
    assert corrected == pytest.approx(gradient)
    assert output.loss.tolist() == pytest.approx(bare.loss.tolist())


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_counting_twice_is_refused(loss: Loss) -> None:
    """A weight beside a loss that has one, of either kind; masks are allowed beside all."""
    for correction in (Correction(token="truncate"), Correction(sequence="truncate", token="mask")):
        if loss == PolicyGradient():
            compose(loss, correction=correction, kl=None)
            continue
        with pytest.raises(ConfigError, match="would count twice"):
            compose(loss, correction=correction, kl=None)
    composed = compose(loss, correction=Correction(token="mask", veto_low=1e-4), kl=None)
    assert isinstance(composed, ComposedLoss)
    assert composed.token_data == loss.token_data
    assert set(composed.per_token(_inputs([1.0])).diagnostics) == set(composed.diagnostics)


def test_nothing_beside_a_loss_is_the_loss() -> None:
    """No wrapping for what is not asked for."""
    loss = CISPO()
    assert compose(loss, correction=None, kl=None) is loss


def test_wrong_bounds_are_refused() -> None:
    """Each message names its option."""
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: Correction(token="clip"), r"correction\.token is 'clip'"),  # type: ignore[arg-type]
        (lambda: Correction(sequence_ratio="mean"), r"correction\.sequence_ratio is"),  # type: ignore[arg-type]
        (lambda: Correction(token_low=1.0), r"correction\.token_low is"),
        (lambda: Correction(sequence_high=1.0), r"correction\.sequence_high is"),
        (lambda: Correction(veto_high=math.nan), r"correction\.veto_high is"),
        (lambda: Correction(token="truncate", sequence="truncate"), "count twice"),
    ]
    for make, message in wrong:
        with pytest.raises(ConfigError, match=message):
            make()
