"""Losses that go wrong where the learner's ranks run."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncrl.learning.losses import CISPO, LossInputs, LossOutput

__all__ = ["Killed", "Raising", "Watching"]


@dataclass(frozen=True, kw_only=True)
class Raising:
    """Raises in rank ``rank``."""

    rank: int = 0
    token_data: ClassVar[tuple[Any, ...]] = ()
    diagnostics: ClassVar[tuple[str, ...]] = ()
    options: Mapping[str, float] | None = None

    def per_token(self, inputs: LossInputs) -> LossOutput:
        if os.environ.get("RANK", "0") == str(self.rank):
            raise IndexError("a user's mistake")
        return LossOutput(loss=inputs.logprobs * 0, diagnostics={})


@dataclass(frozen=True, kw_only=True)
class Killed:
    """Rank ``rank`` is killed, or stopped, in the middle of a pass."""

    rank: int = 0
    number: int = signal.SIGKILL
    token_data: ClassVar[tuple[Any, ...]] = ()
    diagnostics: ClassVar[tuple[str, ...]] = ()

    def per_token(self, inputs: LossInputs) -> LossOutput:
        if os.environ.get("RANK", "0") == str(self.rank):
            os.kill(os.getpid(), self.number)
        return LossOutput(loss=inputs.logprobs * 0, diagnostics={})


@dataclass(frozen=True, kw_only=True)
class Watching(CISPO):
    """From its first use on, nothing is pickled between ranks, or into a file; elsewhere it is only ``CISPO``."""

    def per_token(self, inputs: LossInputs) -> LossOutput:
        import torch
        from torch.distributed import distributed_c10d

        def refuse(*arguments: object, **options: object) -> None:
            raise AssertionError("something is pickled")

        if "RANK" in os.environ:  # the process is the rank's own, and ends with it
            torch.save = distributed_c10d._object_to_tensor = refuse  # type: ignore[assignment]
        return super().per_token(inputs)
