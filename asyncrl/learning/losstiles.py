"""Log-probability and entropy of given tokens after given hidden states, without ever holding whole logits.

The logits exist in tiles of some rows times some of the vocabulary, in float32. Each tile is folded at once into what
is kept of a row: the log of the sum of exponentials so far (online softmax, arXiv 1805.02867), the mean logit and,
where only the hidden state is trained, the mean output weight, which is all that the gradient needs. Where the output
weight is trained too, the backward pass computes the tiles again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["LogitRule", "Pairs", "Tile", "tiled_logprobs"]

Tile = tuple[int, int]
"""Rows and tokens of the vocabulary in one tile of logits."""
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(N, K) inputs and (V, K) weights: the logits are the sum of their products."""

CPU_TILE: Tile = (1024, 1024)
"""4 MiB of float32: the caches of a CPU hold it, and its matrix products run at full speed."""
CUDA_TILE: Tile = (2048, 16384)
"""128 MiB of float32: enough work for all of a GPU."""
LEAST = -1e30
"""Stands for a logit of -inf, which times a probability of 0 would be NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """What a model does to its output layer's values: ``scale * value``, capped ``cap * tanh(scale * value / cap)``."""

    scale: float = 1.0
    softcap: float | None = None


def tiled_logprobs(
    pairs: Pairs,
    targets: torch.Tensor,
    *,
    temperature: torch.Tensor,
    bias: torch.Tensor | None,
    rule: LogitRule,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(N,) float32 log-probabilities of ``targets`` (N,), with gradient, and (N,) float32 entropies, without.

    ``bias`` (V,); ``temperature`` (N,) divides the logits after scale and cap. ``tile`` changes rounding only; its
    default fits the device. float64 is computed and returned in float64.
    """
    inputs, weights = zip(*pairs, strict=True)
    training = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    frozen = not any(one is not None and one.requires_grad for one in (bias, *weights))
    call = _Call(
        targets=targets,
        temperature=temperature,
        rule=rule,
        tile=tile or (CUDA_TILE if targets.is_cuda else CPU_TILE),
        keeps_slopes=training and frozen,
    )
    logprobs, entropy = _TiledLogprobs.apply(call, bias, *inputs, *weights)
    return logprobs, entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What is the same for all tiles."""

    targets: torch.Tensor
    temperature: torch.Tensor
    rule: LogitRule
    tile: Tile
    keeps_slopes: bool
    """The forward pass keeps d logprob / d inputs, (N, K) a pair, in place of a second pass over the tiles."""


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, bias: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tiles = _Tiles(call, bias, tensors)
        logprobs, entropy, lse, slopes = _totals(tiles, call, bias)
        ctx.call = call
        ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(lse, bias, *tensors, *slopes)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        lse, bias, *tensors = ctx.saved_tensors
        if not call.keeps_slopes:
            return None, *_gradients(call, bias, tensors, lse, gradient, ctx.needs_input_grad[1:])
        count = len(tensors) // 3
        # What is not finite where no gradient comes from must not reach the model: NaN times 0 would.
        kept, factor = gradient[:, None] != 0, gradient[:, None]
        slopes = [torch.where(kept, slope * factor, 0) for slope in tensors[2 * count :]]
        inputs = [slope.to(one.dtype) for one, slope in zip(tensors, slopes, strict=False)]
        return None, None, *inputs, *[None] * count


class _Tiles:
    """Computes tiles of logits, each in the memory of the one before."""

    def __init__(self, call: _Call, bias: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> None:
        inputs, self.weights = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        self.dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        self.inputs = [self._computable(one) for one in inputs]
        self._rule = call.rule
        self._tile = call.tile
        self._temperature = call.temperature[:, None].to(self.dtype)
        self._bias = None if bias is None else bias.to(self.dtype).clamp(min=LEAST)
        self._buffer = self.buffer()

    def _computable(self, tensor: torch.Tensor) -> torch.Tensor:
        # A CPU rounds its products of 16 bits to 16 bits.
        return tensor if tensor.is_cuda else tensor.to(self.dtype)

    def buffer(self) -> torch.Tensor:
        """Memory for one tile."""
        size = min(self._tile[0], len(self._temperature)) * min(self._tile[1], len(self.weights[0]))
        return torch.empty(size, dtype=self.dtype, device=self._temperature.device)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Of the same shape, to add up in."""
        return torch.zeros_like(like, dtype=self.dtype)

    def columns(self) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """Parts of the vocabulary with their (v, K) weights. The outer loop: so each is converted only once."""
        for column in _parts(len(self.weights[0]), self._tile[1]):
            yield column, [self._computable(weight[column]) for weight in self.weights]

    def rows(self) -> Iterator[slice]:
        """Parts of the rows."""
        return _parts(len(self._temperature), self._tile[0])

    def logits(self, row: slice, column: slice, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """(n, v) logits / T; overwrites the tile before."""
        temperature, rule = self._temperature[row], self._rule
        x = self._buffer[: len(temperature) * len(weights[0])].view(len(temperature), -1)
        for number, (inputs, weight) in enumerate(zip(self.inputs, weights, strict=True)):
            _add_product(x, inputs[row], weight.T, fresh=number == 0)
        if self._bias is not None:
            x.add_(self._bias[column])
        if rule.softcap is None:
            return x.mul_(rule.scale / temperature)
        return x.mul_(rule.scale / rule.softcap).tanh_().mul_(rule.softcap / temperature)

    def cap_slope(self, x: torch.Tensor, row: slice) -> torch.Tensor | None:
        """1 - (logit / cap)^2, the derivative of the cap, in the memory of ``x``; None without one."""
        if self._rule.softcap is None:
            return None
        return x.mul_(self._temperature[row] / self._rule.softcap).square_().neg_().add_(1)


def _totals(
    tiles: _Tiles, call: _Call, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """log p of each target, the entropy, lse(x) and the slopes, for x = logits / T and p = softmax(x) of each row.

    log p_t = x_t - lse(x) and H = lse(x) - sum p x. A tile's softmax is merged into that of all tiles before with the
    weight w = sum exp(x) of the tile / sum exp(x) with it = sigmoid(lse of the tile - lse before).
    """
    # Hundreds of merges would add up their rounding in float32.
    lse = torch.full_like(call.temperature, -torch.inf, dtype=torch.float64)
    mean, chosen = torch.zeros_like(lse), torch.zeros_like(lse)
    slopes = [tiles.zeros(one) for one in tiles.inputs] if call.keeps_slopes else []
    buffer = tiles.buffer()
    for column, weights in tiles.columns():
        for row in tiles.rows():
            x = tiles.logits(row, column, weights)
            p = torch.softmax(x, -1, out=buffer[: x.numel()].view_as(x))
            # The largest logit's probability is 1 / sum exp(x - max).
            tile_lse = x.amax(-1).double() - p.amax(-1).double().log()
            w = torch.sigmoid(tile_lse - lse[row])
            lse[row] = torch.logaddexp(lse[row], tile_lse)
            mean[row].lerp_(torch.linalg.vecdot(p, x).double(), w)
            place, inside = _places(call.targets[row], column)
            chosen[row] = torch.where(inside, x.gather(1, place)[:, 0].double(), chosen[row])
            if slopes:
                cap_slope = tiles.cap_slope(x, row)
                p = p if cap_slope is None else p.mul_(cap_slope)
                for slope, weight in zip(slopes, weights, strict=True):
                    slope[row].lerp_(_product(p, weight, slope.dtype), w[:, None].to(slope.dtype))
    if bias is not None and call.rule.softcap is None:
        chosen = chosen.masked_fill(bias[call.targets] == -torch.inf, -torch.inf)
    if slopes:
        _finish(slopes, tiles, call, chosen)
    return (chosen - lse).to(tiles.dtype), (lse - mean).to(tiles.dtype), lse.to(tiles.dtype), slopes


def _finish(slopes: Sequence[torch.Tensor], tiles: _Tiles, call: _Call, chosen: torch.Tensor) -> None:
    """Turn E_p[c W] into d log p_t / d inputs = (c_t W_t - E_p[c W]) scale / T, with c the derivative of the cap."""
    for slope, weight in zip(slopes, tiles.weights, strict=True):
        for row in tiles.rows():
            target_weight = weight[call.targets[row]].to(slope.dtype)
            cap_slope = tiles.cap_slope(chosen[row, None].to(slope.dtype, copy=True), row)
            if cap_slope is not None:
                target_weight *= cap_slope
            factor = call.rule.scale / call.temperature[row, None].to(slope.dtype)
            slope[row] = (target_weight - slope[row]) * factor


def _gradients(
    call: _Call,
    bias: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    lse: torch.Tensor,
    gradient: torch.Tensor,
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Of the bias, the inputs and the weights, where ``wanted`` says so."""
    # Clipped tokens and those without advantage cost nothing, and send nothing back whatever they are.
    kept = gradient.nonzero()[:, 0]
    count = len(tensors) // 2
    call = replace(call, targets=call.targets[kept], temperature=call.temperature[kept])
    tiles = _Tiles(call, bias, [*(one[kept] for one in tensors[:count]), *tensors[count:]])
    factor = (gradient[kept] * -call.rule.scale / call.temperature).to(tiles.dtype)
    sums = _Sums(
        inputs=[tiles.zeros(one) if want else None for one, want in zip(tiles.inputs, wanted[1:], strict=False)],
        weights=[
            (torch.empty_like if len(kept) else torch.zeros_like)(one) if want else None
            for one, want in zip(tiles.weights, wanted[1 + count :], strict=True)
        ],
        bias=tiles.zeros(bias) if bias is not None and wanted[0] else None,
    )
    _backward(tiles, call, lse[kept, None], factor, sums)
    gradients: list[torch.Tensor | None] = [None if bias is None or sums.bias is None else sums.bias.to(bias.dtype)]
    for one, total in zip(tensors, sums.inputs, strict=False):
        rows = None if total is None else (total * factor[:, None]).to(one.dtype)
        gradients.append(None if rows is None else torch.zeros_like(one).index_copy_(0, kept, rows))
    return gradients + sums.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """The gradients that are wanted; those of the inputs still lack each row's factor."""

    inputs: list[torch.Tensor | None]
    weights: list[torch.Tensor | None]
    bias: torch.Tensor | None


def _backward(tiles: _Tiles, call: _Call, lse: torch.Tensor, factor: torch.Tensor, sums: _Sums) -> None:
    """Add up d log p_t / d value_v = -(p_v - [v = t]) c_v scale / T over all tiles; c is the derivative of the cap."""
    weighted = [(one * factor[:, None]).to(one.dtype) for one in tiles.inputs]
    for column, weights in tiles.columns():
        parts = [None if one is None else one[column].to(tiles.dtype) for one in sums.weights]
        for row in tiles.rows():
            error = _errors(tiles, call, lse, row, column, weights)
            for total, weight in zip(sums.inputs, weights, strict=True):
                if total is not None:
                    _add_product(total[row], error, weight)
            for part, inputs in zip(parts, weighted, strict=True):
                if part is not None:
                    _add_product(part, error.T, inputs[row], fresh=row.start == 0)
            if sums.bias is not None:
                sums.bias[column] += factor[row] @ error
        for of_weight, part in zip(sums.weights, parts, strict=True):
            if of_weight is not None and part is not None and part.dtype != of_weight.dtype:
                of_weight[column] = part


def _errors(
    tiles: _Tiles, call: _Call, lse: torch.Tensor, row: slice, column: slice, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """(n, v) (p_v - [v = t]) c_v, in the memory of the tile's logits."""
    x = tiles.logits(row, column, weights)
    cap_slope = tiles.cap_slope(x.clone(), row) if call.rule.softcap is not None else None
    error = x.sub_(lse[row]).exp_()
    place, inside = _places(call.targets[row], column)
    error.scatter_add_(1, place, -inside[:, None].to(error.dtype))
    return error if cap_slope is None else error.mul_(cap_slope)


def _places(targets: torch.Tensor, column: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, 1) the targets' places in this part of the vocabulary, and (n,) whether they are in it."""
    place = targets - column.start
    size = column.stop - column.start
    return place.clamp(0, size - 1)[:, None], (place >= 0) & (place < size)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``left @ right`` in ``dtype``; a GPU multiplies in the 16 bits of ``right`` and adds up in float32."""
    if right.dtype == dtype:
        return torch.mm(left, right)
    return torch.mm(left.to(right.dtype), right, out_dtype=dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, fresh: bool = False) -> None:
    """Add ``left @ right`` to ``total``, or put it there."""
    if right.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if fresh else 1)
    elif fresh:
        torch.mm(left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.add_(_product(left, right, total.dtype))


def _parts(size: int, most: int) -> Iterator[slice]:
    """Ranges that cover ``size``, each of at most ``most``."""
    for start in range(0, size, most):
        yield slice(start, min(start + most, size))
