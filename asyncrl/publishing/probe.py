"""The probe: after each publication every server scores fixed tokens, and must agree with the learner about them.

It finds an adapter that is not used, a scale that is read differently, weights that did not arrive. The learner's side
is computed when the version is staged, because its parameters have moved on by the time the servers hold them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncrl.errors import ProbeMismatch
from asyncrl.learning.base import Learner, model_vocab_size
from asyncrl.sampling.control import ServerControl
from asyncrl.types import FloatArray, IntArray

__all__ = ["Probe"]

_TOKENS = 24
_SEED = 20_240


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """Fixed tokens, and how far two implementations may be apart about them."""

    tokens: IntArray
    """(T,) ids that are all in the vocabulary; T is at least 2."""
    tolerance: float = 1e-3
    """Largest absolute log-probability difference. Right for float32 on both sides; bfloat16 needs some tenths."""

    @classmethod
    def for_model(cls, model_path: Path, *, tolerance: float = 1e-3) -> Probe:
        """Arbitrary but fixed ids out of the vocabulary of the model in ``model_path``."""
        # Not the last id: some servers report it as 0 when it stands in a prompt.
        usable = model_vocab_size(model_path) - 1
        ids = np.random.default_rng(_SEED).integers(0, usable, size=_TOKENS, dtype=np.int32)
        return cls(tokens=ids, tolerance=tolerance)

    async def reference(self, learner: Learner) -> FloatArray:
        """(T - 1,) what the learner says now."""
        return await learner.logprobs(self.tokens, start=1, temperature=1.0)

    async def check(
        self, server: ServerControl, reference: FloatArray, *, version: int, adapter: str | None = None
    ) -> float:
        """The largest difference between ``server`` and ``reference``; ``ProbeMismatch`` if it is too large."""
        # A namespace of its own each time: a probe that reads cached KV says nothing about the weights.
        extra_key = f"probe-v{version}-{uuid.uuid4().hex}"
        served = await server.score(self.tokens, start=1, adapter=adapter, extra_key=extra_key)
        differences = np.abs(served - reference)
        worst = int(np.argmax(differences))  # NaN counts as the largest
        if not differences[worst] <= self.tolerance:
            raise ProbeMismatch(
                f"{server.url} does not hold version {version}: it gives probe token {worst + 1} the log-probability "
                f"{served[worst]:.6g}, the learner {reference[worst]:.6g}; allowed difference {self.tolerance:g}"
            )
        return float(differences[worst])
