"""Drawing tokens: which log-probability is reported, and what top-k, top-p and min-p leave."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.servers.wireserver import GenerateRequest, parse_generate

LOGITS = (2.0, 1.0, 0.0, -1.0)
# Probabilities 0.644, 0.237, 0.087, 0.032.


def params(**options: Any) -> GenerateRequest:
    """A request with these sampling parameters."""
    return parse_generate({"input_ids": [1], "sampling_params": options})


def drawn(number: float, **options: Any) -> tuple[int, float]:
    """The token and log-probability that the uniform ``number`` gives."""
    import torch

    from asyncrl.servers.embedded.sampling import draw

    tokens, logprobs = draw(torch.tensor([LOGITS]), [params(**options)], [number])
    return tokens[0], logprobs[0]


def tempered(token: int, temperature: float) -> float:
    """log softmax(LOGITS / temperature)[token]."""
    import torch

    return float(torch.log_softmax(torch.tensor(LOGITS) / temperature, dim=-1)[token])


@pytest.mark.parametrize(("number", "token"), [(0.0, 0), (0.64, 0), (0.65, 1), (0.89, 2), (0.97, 3), (0.999999, 3)])
def test_a_uniform_number_picks_by_probability(number: float, token: int) -> None:
    """The inverse of the cumulative distribution."""
    assert drawn(number) == pytest.approx((token, tempered(token, 1.0)), abs=1e-5)


def test_the_temperature_is_in_the_logprob() -> None:
    """It is that of the distribution which was sampled from."""
    assert drawn(0.0, temperature=0.5) == pytest.approx((0, tempered(0, 0.5)), abs=1e-5)


def test_temperature_zero_is_greedy_and_untempered() -> None:
    """As in SGLang: top-k 1 at temperature 1."""
    assert drawn(0.99, temperature=0.0) == pytest.approx((0, tempered(0, 1.0)), abs=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}])
def test_restrictions_leave_the_likeliest_and_the_logprob(options: dict[str, Any]) -> None:
    """Two tokens are left, drawn in proportion, and reported as before the restriction."""
    assert drawn(0.73, **options) == pytest.approx((0, tempered(0, 1.0)), abs=1e-5)
    assert drawn(0.74, **options) == pytest.approx((1, tempered(1, 1.0)), abs=1e-5)
    assert drawn(0.999999, **options)[0] == 1


def test_each_row_has_its_own_parameters() -> None:
    """Greedy, restricted and tempered rows in one call."""
    import torch

    from asyncrl.servers.embedded.sampling import draw

    rows = [params(temperature=0.0), params(top_k=1), params(temperature=2.0), params()]
    tokens, logprobs = draw(torch.tensor([LOGITS] * 4), rows, [0.99] * 4)
    assert tokens == [0, 0, 3, 3]
    assert logprobs == pytest.approx([tempered(0, 1.0), tempered(0, 1.0), tempered(3, 2.0), tempered(3, 1.0)], abs=1e-5)


def test_the_numbers_of_a_seed_are_fixed_and_even() -> None:
    """They depend on seed and position alone, and fill [0, 1)."""
    from asyncrl.servers.embedded.sampling import uniform

    numbers = [uniform(seed, position) for seed in (0, 1, 2**40) for position in range(500)]
    assert numbers == [uniform(seed, position) for seed in (0, 1, 2**40) for position in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    tenths = [sum(int(number * 10) == tenth for number in numbers) for tenth in range(10)]
    assert min(tenths) > 100
