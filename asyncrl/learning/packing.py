"""Cutting sequences of different lengths into padded micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["micro_batches"]


def micro_batches(lengths_B: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: of similar length, at most ``max_tokens`` with padding.

    A sequence that is longer than ``max_tokens`` gets a micro-batch of its own. Longest first, so that a batch that
    does not fit into memory fails at once and not after minutes. Deterministic.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths_B)), key=lambda index: (-lengths_B[index], index)):
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths_B[index]
    return batches
