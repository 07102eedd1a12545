from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.learning.losshead import head_logprobs
from asyncrl.learning.losstiles import LogitRule, Tile, tiled_logprobs

TRAINED = [("hidden",), ("weight",), ("bias",), ("hidden", "weight"), ("hidden", "weight", "bias")]


def _drawn(rows: int, size: int, vocabulary: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of the head; logits reach some 10, so that some targets are all but impossible."""
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype)

    return {
        "hidden": normal(rows, size) * 3,
        "weight": normal(vocabulary, size),
        "targets": torch.randint(0, vocabulary, (rows,), generator=chance),
        "temperature": torch.rand(rows, generator=chance) + 0.5,
        "bias": normal(vocabulary),
    }


def _whole(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from all logits at once."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature[:, None]).log_softmax(-1)
    entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def _results(head: Any, arguments: dict[str, Any], trained: tuple[str, ...], **options: Any) -> list[torch.Tensor]:
    """Log-probabilities, entropies, and gradients of a loss that weighs rows differently, every third not at all."""
    leaves = {name: arguments[name].clone().requires_grad_() for name in trained}
    logprobs, entropy = head(**{**arguments, **leaves}, **options)
    weights = torch.linspace(-1, 2, len(logprobs)).to(logprobs.dtype)
    weights[::3] = 0
    gradients = torch.autograd.grad(logprobs @ weights, list(leaves.values()))
    return [logprobs.detach(), entropy.detach(), *gradients]


def _assert_close(left: list[torch.Tensor], right: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 23)),
    tile=st.tuples(st.integers(1, 10), st.integers(2, 25)),
    trained=st.sampled_from(TRAINED),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_any_tile_gives_what_whole_logits_give(
    shape: tuple[int, int, int],
    tile: Tile,
    trained: tuple[str, ...],
    scale: float,
    softcap: float | None,
    seed: int,
) -> None:
    """Values and gradients, whatever is trained, also for tiles that divide nothing."""
    arguments = _drawn(*shape, seed)
    options = {"scale": scale, "softcap": softcap}
    tiled = _results(head_logprobs, arguments, trained, tile=tile, **options)
    _assert_close(tiled, _results(_whole, arguments, trained, **options), 1e-9)


@pytest.mark.parametrize("trained", TRAINED, ids="+".join)
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_gradients_are_finite_differences(trained: tuple[str, ...], softcap: float | None) -> None:
    """In float64, for both ways to the gradient."""
    arguments = _drawn(4, 3, 7)

    def logprobs(*leaves: torch.Tensor) -> torch.Tensor:
        changed = {**arguments, **dict(zip(trained, leaves, strict=True))}
        return head_logprobs(**changed, scale=0.5, softcap=softcap, tile=(3, 4))[0]

    assert torch.autograd.gradcheck(logprobs, [arguments[name].clone().requires_grad_() for name in trained])


def test_float32_is_as_exact_as_whole_logits() -> None:
    """Merging many tiles adds no rounding that shows."""
    exact = _results(_whole, _drawn(40, 16, 1000), ("hidden", "weight"))
    for trained in (("hidden",), ("hidden", "weight")):
        near = _results(head_logprobs, _drawn(40, 16, 1000, dtype=torch.float32), trained, tile=(16, 29))
        assert {one.dtype for one in near} == {torch.float32}
        _assert_close(near, exact[: len(near)], 2e-5)


def test_16_bit_weights_are_computed_in_float32() -> None:
    """The entropy of bfloat16 inputs is within 1e-3 of what float32 gives for them; gradients have the inputs' type."""
    arguments = _drawn(30, 64, 500, dtype=torch.bfloat16)
    wide = {**arguments, **{name: arguments[name].float() for name in ("hidden", "weight", "bias")}}
    for trained in (("hidden",), ("hidden", "weight", "bias")):
        narrow = _results(head_logprobs, arguments, trained, tile=(8, 64))
        logprobs, entropy, *gradients = _results(_whole, wide, trained)
        _assert_close(narrow[:2], [logprobs, entropy], 1e-4)
        assert {one.dtype for one in narrow[2:]} == {torch.bfloat16}
        _assert_close(narrow[2:], [one.bfloat16() for one in gradients], 0.02)


@pytest.mark.parametrize("trained", TRAINED, ids="+".join)
def test_impossible_tokens_make_no_nan(trained: tuple[str, ...]) -> None:
    """Neither logits of -inf nor probabilities that are 0 in float32, of targets too."""
    arguments = _drawn(6, 3, 12, dtype=torch.float32)
    arguments["bias"][[0, 1, 2, 3, 9]] = -math.inf  # a whole tile, and one token of another
    arguments["bias"][5] = -1e4
    arguments["targets"] = torch.tensor([5, 9, 4, 6, 11, 7])
    tiled = _results(head_logprobs, arguments, trained, tile=(4, 4))
    assert tiled[0][1] == -math.inf
    finite = [tiled[0][[0, 2, 3, 4, 5]], *tiled[1:]]
    assert all(one.isfinite().all() for one in finite)
    logprobs, entropy = _whole(**arguments)
    _assert_close([tiled[0], tiled[1]], [logprobs, entropy], 1e-5)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A row that the loss does not count spoils no gradient, whatever stands in it."""
    for trained in (("hidden",), ("hidden", "weight")):
        arguments = _drawn(6, 3, 12)
        clean = _results(head_logprobs, arguments, trained, tile=(4, 5))
        arguments["hidden"][3] = math.nan
        spoiled = _results(head_logprobs, arguments, trained, tile=(4, 5))
        _assert_close(spoiled[2:], clean[2:], 1e-12)
        assert spoiled[0].isnan().tolist() == [False, False, False, True, False, False]


def test_a_low_rank_pair_adds_to_the_weight() -> None:
    """[hidden, z] with [W, B] is hidden W^T + z B^T, with gradients for whichever is trained."""
    arguments = _drawn(7, 4, 11)
    low = _drawn(7, 2, 11, seed=1)

    def paired(z: torch.Tensor, low_weight: torch.Tensor, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [(others["hidden"], others["weight"]), (z, low_weight)]
        common = {name: others[name] for name in ("temperature", "bias")}
        return tiled_logprobs(pairs, others["targets"], **common, rule=LogitRule(scale=0.5), tile=(3, 4))

    def joined(z: torch.Tensor, low_weight: torch.Tensor, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = torch.cat([others["hidden"], z], 1), torch.cat([others["weight"], low_weight], 1)
        return _whole(**{**others, "hidden": hidden, "weight": weight}, scale=0.5)

    both = {**arguments, "z": low["hidden"], "low_weight": low["weight"]}
    for trained in (("z",), ("hidden", "z"), ("hidden", "z", "low_weight"), ("low_weight",)):
        _assert_close(_results(paired, both, trained), _results(joined, both, trained), 1e-9)


def test_a_tied_weight_gets_both_gradients() -> None:
    """The embedding that the hidden states come from is the output weight too."""
    arguments = _drawn(6, 3, 12)
    ids = torch.arange(6)

    def tied(head: Any) -> Any:
        return lambda weight, **others: head(**{**others, "hidden": weight[ids].tanh() * 3, "weight": weight})

    near, exact = (_results(tied(head), arguments, ("weight",)) for head in (head_logprobs, _whole))
    _assert_close(near, exact, 1e-9)


def test_no_rows_are_no_rows() -> None:
    """A pass without trained tokens gives nothing, and a gradient of nothing."""
    logprobs, entropy, gradient = _results(head_logprobs, _drawn(0, 3, 12), ("weight",))
    assert len(logprobs) == len(entropy) == 0
    assert gradient.abs().sum() == 0


def test_a_gradient_is_there_only_where_one_is_asked_for() -> None:
    """Not under ``no_grad``, and never of the entropy."""
    arguments = _drawn(3, 2, 5)
    arguments["hidden"].requires_grad_()
    logprobs, entropy = head_logprobs(**arguments)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    with torch.no_grad():
        assert not head_logprobs(**arguments)[0].requires_grad


def test_without_any_gradient_the_weight_gets_zeros() -> None:
    """Where no row counts, no memory is left as it was found."""
    arguments = _drawn(3, 2, 5)
    arguments["weight"].requires_grad_()
    logprobs, _ = head_logprobs(**arguments)
    (gradient,) = torch.autograd.grad(logprobs @ torch.zeros(3, dtype=torch.float64), arguments["weight"])
    assert gradient.abs().sum() == 0
