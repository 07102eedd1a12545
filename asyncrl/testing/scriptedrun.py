"""One request inside a scripted server: how many of its tokens are there by now, and which."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from asyncrl.concurrency.notifier import Notifier
from asyncrl.servers.generation import Generation
from asyncrl.testing.theta import draw_token, theta_logprobs

__all__ = ["PrefixMemory", "Run", "text_of"]

_PREFIXES = 8
# Of each namespace; enough for a test, and matching stays quick.
_ROUNDING_S = 1e-6
# Times are sums of floats, and what is left of them may be less than the clock can tell.


@dataclass(slots=True, kw_only=True, eq=False)
class Run(Generation[float]):
    """A request and how far it is; one that is ``held`` stops half way until ``hurry``."""

    script: Sequence[int] | None
    """Its tokens, or None to draw them."""
    seconds: float
    """How long all its tokens take."""
    held: bool
    changed: Notifier = field(default_factory=Notifier)
    """Notified when the request is to go on, to stop or to end."""
    running: bool = False
    abort_sent: bool = False
    abort_pending: bool = False
    _worked_s: float = 0.0
    _since: float = 0.0
    _prompt_theta: float | None = None
    _lag: float | None = None
    # Theta of the token that was under way when the request was frozen.

    def allow(self, tokens: int) -> None:
        """Set how many tokens the request may have; a script may have fewer."""
        self.max_new_tokens = tokens if self.script is None else min(tokens, len(self.script))

    def prefill(self, prefixes: PrefixMemory, theta: float) -> None:
        """Find what is cached of the prompt, and score it, the first time."""
        if self._prompt_theta is not None:
            return
        self._prompt_theta = theta
        ids = self.wire.input_ids
        self.cached_tokens = prefixes.match(self.namespace, ids[: self.cacheable])
        prefixes.insert(self.namespace, ids)
        start = self.wire.logprob_start_len
        tokens = ids[start:] if start >= 0 else []
        if tokens:
            # As in SGLang: never tempered, and without a value for the first.
            scores = theta_logprobs(tokens, theta).tolist()
            self.prompt_logprobs = list(zip([None, *scores[1:]], tokens, strict=True))

    def go(self) -> None:
        """Start or resume: tokens appear from now on, at an even pace."""
        self.running = True
        self._since = anyio.current_time()
        self.changed.notify()

    def stop(self, *, lag: float | None) -> None:
        """No token appears until it goes on. ``lag``: theta of one that is under way all the same."""
        if self.running:
            self._worked_s += anyio.current_time() - self._since
            self.running = False
            self._lag = lag
            self.changed.notify()

    def hurry(self) -> None:
        """Make all remaining tokens due at once."""
        self.held, self.seconds = False, 0.0
        self.changed.notify()

    def finished(self, reason: Mapping[str, Any]) -> None:
        """End the request with the tokens that it has; nothing happens if it has ended."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.running = False
            self.changed.notify()

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second at this moment; 0 while it is held or stopped."""
        if self.held or not self.running or not self.seconds:
            return 0.0
        return self.max_new_tokens / self.seconds

    def seconds_left(self) -> float:
        """Seconds until its last token, if nothing happens; infinite while it is held."""
        if self.held:
            return math.inf
        left = self.seconds - self._worked_s - (anyio.current_time() - self._since)
        return left if left > _ROUNDING_S else 0.0

    def advance(self, theta: float, label: str, *, uniform: Callable[[], float]) -> None:
        """Append the tokens that are due by now, drawn from the weights ``theta`` and labelled ``label``."""
        due = self._due()
        while self.output_tokens < due and self.finish_reason is None:
            self._append(theta, label, uniform=uniform)
        if self.finish_reason is None and not self.max_new_tokens:
            self.finish_reason = {"type": "length", "length": 0}
        if self.finish_reason is not None:
            self.running = False
            self.changed.notify()

    def _due(self) -> int:
        if self.held:
            return self.max_new_tokens // 2
        left = self.seconds_left()
        if left <= 0:
            return self.max_new_tokens
        return int(self.max_new_tokens * (self.seconds - left) / self.seconds)

    def _append(self, theta: float, label: str, *, uniform: Callable[[], float]) -> None:
        wire = self.wire
        # A frozen server has begun its next step: that token is of the old weights, whatever its label says.
        theta, self._lag = theta if self._lag is None else self._lag, None
        if self.script is not None:
            token = int(self.script[self.output_tokens])
        else:
            token = draw_token(
                theta, uniform(), temperature=wire.temperature, top_k=wire.top_k, top_p=wire.top_p, min_p=wire.min_p
            )
        self.append(token, float(theta_logprobs([token], theta, temperature=wire.temperature)[0]), label, text_of)


class PrefixMemory:
    """Which sequences are cached, by namespace."""

    def __init__(self) -> None:
        self._known: dict[Hashable, deque[tuple[int, ...]]] = {}

    def match(self, namespace: Hashable, tokens: Sequence[int]) -> int:
        """The length of the longest cached prefix of ``tokens``."""
        return max((_common(tokens, known) for known in self._known.get(namespace, ())), default=0)

    def insert(self, namespace: Hashable, tokens: Sequence[int]) -> None:
        """Cache ``tokens``."""
        self._known.setdefault(namespace, deque(maxlen=_PREFIXES)).append(tuple(tokens))

    def clear(self) -> None:
        """Forget every cached sequence."""
        self._known.clear()


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return position
    return min(len(one), len(two))


def text_of(ids: Sequence[int]) -> str:
    """One character for each token."""
    return "".join(chr(0x100 + token) for token in ids)
