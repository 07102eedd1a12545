from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.learning.losses import (
    CISPO,
    DPPO,
    GSPO,
    PPO,
    SAPO,
    DecoupledPPO,
    GeometricMean,
    IcePop,
    Loss,
    PolicyGradient,
    Proximal,
    loss_from,
    loss_kinds,
)
from tests.learning.lossinputs import evaluate, loss_inputs

ALL = tuple(kind() for kind in loss_kinds().values())


def _diagnostic(loss: Loss, name: str, ratios: list[float], advantages: list[float]) -> list[float]:
    logp = [-1.0 + math.log(ratio) for ratio in ratios]
    inputs = loss_inputs(logp, [-1.0] * len(logp), advantages, proximal=[-1.0] * len(logp))
    values: list[float] = loss.per_token(inputs).diagnostics[name].tolist()
    return values


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
@pytest.mark.parametrize(("logp", "mu"), [(-1.0, -100.0), (-1.0, -3e38), (-1.0, -math.inf), (-100.0, -1.0)])
def test_a_token_that_one_side_thought_impossible_stays_finite(loss: Loss, logp: float, mu: float) -> None:
    """A log-ratio of 99 or of infinity gives a large loss and gradient, for either sign, but no overflow."""
    inputs = loss_inputs([logp] * 3, [mu] * 3, [-1.0, 0.0, 1.0], proximal=[logp] * 3, dtype=torch.float32)
    output, gradient = evaluate(loss, inputs)
    assert output.loss.dtype == torch.float32
    for values in (output.loss, torch.tensor(gradient), *output.diagnostics.values()):
        assert values.isfinite().all()


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_on_policy_all_losses_have_the_policy_gradient(loss: Loss) -> None:
    """Ratio 1: every correction is silent."""
    _, gradient = evaluate(loss, loss_inputs([-1.0, -0.3], [-1.0, -0.3], [0.7, 0.7], proximal=[-1.0, -0.3]))
    assert gradient == pytest.approx([-0.7, -0.7])


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_a_pass_without_tokens_has_a_gradient_of_nothing(loss: Loss) -> None:
    """A backward pass can be made of it."""
    output, gradient = evaluate(loss, loss_inputs([], [], [], tokens_B=[], proximal=[]))
    assert gradient == []
    assert set(output.diagnostics) == set(loss.diagnostics)


@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.name)
def test_diagnostics_are_those_that_are_named(loss: Loss) -> None:
    """And carry no gradient, which would keep the graph of the whole pass alive."""
    output = loss.per_token(loss_inputs([-1.0], [-1.5], [1.0], proximal=[-1.2]))
    assert set(output.diagnostics) == set(loss.diagnostics)
    assert not any(values.requires_grad for values in output.diagnostics.values())
    assert output.diagnostics["ratio"].tolist() == pytest.approx([math.exp(0.5)])
    assert output.diagnostics["kl"].tolist() == pytest.approx([math.exp(0.5) - 1 - 0.5])


def test_cispo_keeps_a_gradient_where_ppo_clips_it_away() -> None:
    """What makes it CISPO: a capped weight instead of no gradient."""
    stale = loss_inputs([-0.5], [-4.0], [1.0])
    assert evaluate(PPO(), stale)[1] == [0.0]
    assert evaluate(CISPO(), stale)[1] == pytest.approx([-6.0])


def test_a_negative_advantage_is_bounded() -> None:
    """Stale data with A < 0: the second clip of PPO, or the cap of a decoupled weight, where a minimum has no bound."""
    stale = loss_inputs([-1.0], [-9.0], [-1.0], proximal=[-1.0])
    assert evaluate(PPO(dual_clip=math.inf), stale)[0].loss.item() == pytest.approx(math.exp(8))
    output, gradient = evaluate(PPO(), stale)
    assert (output.loss.item(), gradient) == (3.0, [0.0])
    output, _ = evaluate(DecoupledPPO(), stale)
    assert output.loss.item() == pytest.approx(5.0)
    assert output.diagnostics["behaviour_weight"].tolist() == [5.0]
    assert output.diagnostics["behaviour_capped_frac"].tolist() == [1.0]


def test_clipped_tokens_are_counted() -> None:
    """Only where the clip changes the gradient."""
    ratios, signs = [1.0, 0.5, 0.5, 2.0, 2.0, 9.0], [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    assert _diagnostic(PPO(), "clipped_frac", ratios, signs) == [0, 0, 1, 1, 0, 1]
    assert _diagnostic(PPO(dual_clip=math.inf), "clipped_frac", ratios, signs) == [0, 0, 1, 1, 0, 0]
    assert _diagnostic(DecoupledPPO(), "clipped_frac", ratios, signs) == [0, 0, 1, 1, 0, 0]
    assert _diagnostic(CISPO(), "clipped_frac", ratios, signs) == [0, 0, 0, 0, 0, 1]
    assert _diagnostic(GeometricMean(), "clipped_frac", ratios, signs) == [0, 0, 1, 1, 0, 0]
    assert _diagnostic(IcePop(low=0.4), "masked_frac", ratios, signs) == [0, 0, 0, 0, 0, 1]
    assert _diagnostic(SAPO(), "gate", ratios, signs) == pytest.approx([1, 0.940, 0.934, 0.786, 0.768, 0.001], abs=1e-3)


def test_a_rare_token_may_change_by_a_large_factor() -> None:
    """DPPO bounds probabilities: 0.001 to 0.01 is little, 0.3 to 0.6 is much, and on the way back nothing is."""
    logp, mu = [math.log(p) for p in (0.01, 0.6, 0.6)], [math.log(p) for p in (0.001, 0.3, 0.3)]
    for loss in (DPPO(), DPPO(divergence="kl")):
        output, gradient = evaluate(loss, loss_inputs(logp, mu, [1.0, 1.0, -1.0]))
        assert gradient == pytest.approx([-10.0, 0.0, 2.0])
        assert output.diagnostics["masked_frac"].tolist() == [0, 1, 0]


def test_a_sequence_is_clipped_as_one() -> None:
    """GSPO: log-ratios of 0.3 and -0.1 have the mean 0.1, over the bound; a second sequence keeps its gradient."""
    inputs = loss_inputs([-0.7, -1.1, -1.0], [-1.0, -1.0, -1.0], [1.0] * 3, tokens_B=[2, 1])
    output, gradient = evaluate(GSPO(), inputs)
    assert gradient == pytest.approx([0.0, 0.0, -1.0])
    assert output.diagnostics["clipped_frac"].tolist() == [1, 1, 0]
    assert output.diagnostics["sequence_ratio"].tolist() == pytest.approx([math.exp(0.1)] * 2 + [1.0])


@pytest.mark.parametrize("loss", [IcePop(), DPPO(), DPPO(divergence="kl")], ids=repr)
@pytest.mark.parametrize(("logp", "mu"), [(-math.inf, -1.0), (-1.0, math.nan), (math.nan, -1.0), (-1.0, -math.inf)])
def test_what_is_no_number_at_a_masked_token_reaches_no_gradient(loss: Loss, logp: float, mu: float) -> None:
    """On either side: its gradient is 0 and not NaN, and that of the others is theirs."""
    output, gradient = evaluate(loss, loss_inputs([-1.0, logp], [-1.0, mu], [1.0, 1.0]))
    if output.diagnostics["masked_frac"].tolist() == [0, 1]:
        assert output.loss.isfinite().all()
        assert gradient == [-1.0, 0.0]
    else:
        assert (logp, gradient[0]) in ((-math.inf, -1.0), (-1.0, -1.0))
        assert math.isfinite(gradient[1])


def test_a_proximal_policy_between_versions() -> None:
    """Log-linear: a token of age 1 after one update is half way; at the step's start it is the current policy."""
    loss = DecoupledPPO(proximal="loglinear", max_importance_weight=9.0)
    inputs = loss_inputs([-1.0] * 2, [-1.8] * 2, [1.0] * 2, ages=[1, 0], updates=1)
    assert loss.per_token(inputs).diagnostics["behaviour_weight"].tolist() == pytest.approx([math.exp(0.4), 1.0])
    first = loss_inputs([-1.0] * 2, [-1.8] * 2, [1.0] * 2, ages=[1, 0])
    assert loss.per_token(first).diagnostics["behaviour_weight"].tolist() == pytest.approx([math.exp(0.8)] * 2)


def test_only_a_proximal_policy_by_a_forward_pass_asks_for_data() -> None:
    """And without them nothing is trained."""
    assert {loss.name: loss.token_data for loss in ALL if loss.token_data} == {"decoupled_ppo": (Proximal(),)}
    assert DecoupledPPO(proximal="loglinear").token_data == ()
    with pytest.raises(KeyError, match="proximal"):
        DecoupledPPO().per_token(loss_inputs([-1.0], [-1.0], [1.0]))


def test_losses_have_names() -> None:
    """The name alone gives the defaults."""
    assert {name: loss_from(name) for name in loss_kinds()} == {loss.name: loss for loss in ALL}
    assert loss_from("policy_gradient") == PolicyGradient()


def test_options_of_a_named_loss() -> None:
    """Options go into the object; an object of the user's own is taken as it is."""
    assert loss_from("cispo", eps_max=3.0) == CISPO(eps_max=3.0)
    assert loss_from("dppo", divergence="kl", delta=0.1) == DPPO(divergence="kl", delta=0.1)
    loss = PPO()
    assert loss_from(loss) is loss


def test_unknown_names_and_options_are_refused() -> None:
    """The message has the nearest known one."""
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        loss_from("cipso")
    with pytest.raises(ConfigError, match="did you mean 'clip_low'"):
        loss_from("ppo", clip_lo=0.1)
    with pytest.raises(ConfigError, match=r"loss\.eps_max is '6'"):
        loss_from("cispo", eps_max="6")
    with pytest.raises(ConfigError, match=r"loss\.delta is '0\.1'.*a number"):
        loss_from("dppo", delta="0.1")
    with pytest.raises(ConfigError, match=r"loss\.divergence is 1.*a text"):
        loss_from("dppo", divergence=1)
    with pytest.raises(ConfigError, match="go into the loss object"):
        loss_from(PPO(), clip_low=0.1)


def test_wrong_numbers_are_refused() -> None:
    """Each message names its option."""
    wrong: list[tuple[Callable[[], Loss], str]] = [
        (lambda: CISPO(eps_max=0.0), "eps_max"),
        (lambda: CISPO(eps_max=math.nan), "eps_max"),
        (lambda: PPO(clip_low=1.0), "clip_low"),
        (lambda: PPO(dual_clip=1.0), "dual_clip"),
        (lambda: DecoupledPPO(clip_high=-0.1), "clip_high"),
        (lambda: DecoupledPPO(max_importance_weight=math.inf), "max_importance_weight"),
        (lambda: DecoupledPPO(proximal="linear"), "proximal"),  # type: ignore[arg-type]
        (lambda: GSPO(clip_low=1.0), "clip_low"),
        (lambda: GeometricMean(clip_high=0.0), "clip_high"),
        (lambda: DPPO(divergence="js"), "divergence"),  # type: ignore[arg-type]
        (lambda: DPPO(delta=0.0), "delta"),
        (lambda: IcePop(low=1.0), "low"),
        (lambda: IcePop(high=1.0), "high"),
        (lambda: SAPO(tau_negative=0.0), "tau_negative"),
    ]
    for make, option in wrong:
        with pytest.raises(ConfigError, match=rf"loss\.{option} is"):
            make()
