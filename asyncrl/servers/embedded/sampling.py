"""Drawing tokens: logits to ids and log-probabilities, with SGLang's order of operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.servers.wireserver import GenerateRequest

__all__ = ["draw", "uniform"]

_MASK = (1 << 64) - 1
_GREEDY_BELOW = 1e-6


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / (1 << 53)


def draw(
    logits: torch.Tensor, params: Sequence[GenerateRequest], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token for each row of (B, V) logits, and its log-probability.

    The log-probability is taken after the temperature and before top-k, top-p and min-p. Temperature 0 is the most
    likely token, with the log-probability at temperature 1. ``uniforms`` are the draws in [0, 1), one a row.
    """
    greedy = [p.temperature < _GREEDY_BELOW for p in params]
    temperatures = [1.0 if likeliest else float(p.temperature) for likeliest, p in zip(greedy, params, strict=True)]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    if all(greedy):
        tokens = logprobs.argmax(-1)
    else:
        probabilities = _restricted(logprobs.exp(), params)
        totals = probabilities.double().cumsum(-1)
        wanted = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * totals[:, -1:]
        tokens = torch.searchsorted(totals, wanted, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens.tolist(), chosen.tolist()


def _restricted(probabilities: torch.Tensor, params: Sequence[GenerateRequest]) -> torch.Tensor:
    """Zero what top-k, top-p and min-p leave out, where a row asks for it."""
    for row, p in enumerate(params):
        if p.top_k < 1 and p.top_p >= 1.0 and p.min_p <= 0.0:
            continue
        values, order = probabilities[row].sort(descending=True)
        keep = values >= p.min_p * values[0]
        # A token stays while the mass before it is below top_p, so that the first always stays.
        keep &= values.cumsum(0) - values < p.top_p
        if 1 <= p.top_k < len(keep):
            keep[p.top_k :] = False
        probabilities[row, order[~keep]] = 0.0
    return probabilities
