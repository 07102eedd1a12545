"""What losses know of each token beside the pass: computed once a step, before its first update, kept till its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import ConfigError
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import Loss, ScoringModel
from asyncrl.learning.modelloading import load_causal
from asyncrl.learning.policymodule import PolicyModule
from asyncrl.learning.torch_peers import Peers

__all__ = ["PolicyScoring", "StepData"]


class StepData:
    """Owns the values of a step's sequences."""

    def __init__(self, scoring: ScoringModel) -> None:
        self._scoring = scoring
        # The sequence is kept with its values: an id is only unique while its object lives.
        self._kept: dict[tuple[str, int], tuple[TrainingSequence, torch.Tensor]] = {}

    def prepare(self, sequences: Sequence[TrainingSequence], loss: Loss) -> None:
        """Compute what ``loss`` asks for, with the parameters as they are now."""
        for data in loss.token_data:
            for sequence, values in zip(sequences, data.compute(self._scoring, sequences), strict=True):
                _require_one_each(data.name, values, int(sequence.mask.sum()))
                self._kept[data.name, id(sequence)] = (sequence, values.detach().float())

    def of(self, sequences: Sequence[TrainingSequence], loss: Loss, device: torch.device) -> dict[str, torch.Tensor]:
        """Name -> (trained tokens of all,) values."""
        return {
            data.name: torch.cat([self._kept[data.name, id(sequence)][1].to(device) for sequence in sequences])
            for data in loss.token_data
        }

    def clear(self) -> None:
        """Forget them."""
        self._kept.clear()


def _require_one_each(name: str, values: torch.Tensor, tokens: int) -> None:
    if tuple(values.shape) != (tokens,):
        raise ConfigError.for_value(
            f"the shape of the loss's token data {name!r}",
            tuple(values.shape),
            f"({tokens},), a value for each trained token of the sequence",
        )


class PolicyScoring:
    """A ``ScoringModel``: log-probabilities under the policy, and under the model that training began from."""

    def __init__(
        self, policy: PolicyModule, path: Path, *, adapted: Any, max_tokens: int, peers: Peers, device: str
    ) -> None:
        """``adapted``: PEFT's model around the policy's, None if all weights are trained."""
        self._peers = peers
        self._device = device
        self._policy = policy
        self._path = path
        self._adapted = adapted
        self._max_tokens = max_tokens
        self._beginning: PolicyModule | None = None

    @property
    def path(self) -> Path:
        """The model folder that training began from."""
        return self._path

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainingSequence], *, adapter: bool = True) -> list[torch.Tensor]:
        """(trained tokens,) float32 log-probabilities for each sequence, see ``ScoringModel``."""
        if adapter:
            return self._logprobs(self._policy, sequences)
        if self._adapted is None:
            return self._logprobs(self._initial, sequences)
        with self._adapted.disable_adapter():
            return self._logprobs(self._policy, sequences)

    def _logprobs(self, policy: PolicyModule, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        counts_B = [int(sequence.mask.sum()) for sequence in sequences]
        found = torch.zeros(sum(counts_B))
        parts = found.split(counts_B)
        for one, counts in self._peers.shares(policy, sequences, self._max_tokens):
            logprobs, _ = policy(one)
            for index, part in zip(one.sequences, logprobs.split(one.tokens_B), strict=True):
                if counts:
                    parts[index].copy_(part.cpu())
        return list(self._peers.summed(found).split(counts_B))

    @property
    def _initial(self) -> PolicyModule:
        if self._beginning is None:
            causal = self._policy.causal
            dtype = str(causal.dtype).removeprefix("torch.")
            device = self._peers.load_device(self._device)
            copy = load_causal(self._path, dtype=dtype, device=device).requires_grad_(False)
            self._beginning = PolicyModule(copy)
            self._beginning.unshared = self._policy.unshared
            self._peers.shard(self._beginning, name=self._device)
        return self._beginning
