"""A request for tokens inside one of our own servers: what it has so far, and the reply that is made of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncrl.servers.adapters import LoadedAdapter
from asyncrl.servers.wireserver import GenerateRequest

__all__ = ["ABORTED", "ABORTED_WAITING", "Generation"]

ABORTED: Mapping[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
"""The finish reason of a request that was aborted while it ran."""

ABORTED_WAITING: Mapping[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
"""That of one which waited, for the first time or again. Its reply says nothing of the prompt."""

W = TypeVar("W")
_TAIL_TOKENS = 8
# A stop string can begin inside a token and end inside a later one; looking this much further back finds it.


@dataclass(slots=True, kw_only=True, eq=False)
class Generation(Generic[W]):
    """What both servers know of a request."""

    wire: GenerateRequest
    tokens: array[int]
    """Prompt and output."""
    max_new_tokens: int = 0
    """After clipping to the context."""
    stop_ids: frozenset[int] = frozenset()
    adapter: LoadedAdapter[W] | None = None
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(label, first output token under it)."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the cache at the first prefill."""
    retractions: int = 0
    finish_reason: Mapping[str, Any] | None = None

    @property
    def namespace(self) -> tuple[str, str, int]:
        """KV is shared only within it."""
        return (self.wire.extra_key, self.wire.cache_salt, 0 if self.adapter is None else self.adapter.uid)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.wire.input_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.logprobs)

    @property
    def cacheable(self) -> int:
        """Leading tokens that a cache may have: not the last, from which the next is drawn, nor those to be scored."""
        usable, start = len(self.tokens) - 1, self.wire.logprob_start_len
        return usable if start < 0 else min(usable, start)

    def append(self, token: int, logprob: float, label: str, decode: Callable[[Sequence[int]], str]) -> None:
        """One more token, of the weights called ``label``, which may end it."""
        if not self.versions or self.versions[-1][0] != label:
            self.versions.append((label, len(self.logprobs)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif self.wire.stop and (stop := self._stop(decode)) is not None:
            self.finish_reason = {"type": "stop", "matched": stop}
        elif len(self.logprobs) >= self.max_new_tokens:
            self.finish_reason = {"type": "length", "length": self.max_new_tokens}

    def reply(self, *, label: str, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """The 200 reply, once it has ended. ``label``: of the weights now, for a reply without tokens."""
        assert self.finish_reason is not None
        output_ids = self.tokens[self.prompt_tokens :].tolist()
        versions = self.versions or [(label, 0)]
        ends = [*(start for _, start in versions[1:]), len(output_ids)]
        meta: dict[str, Any] = {
            "id": self.wire.rid,
            "finish_reason": dict(self.finish_reason),
            "completion_tokens": len(output_ids),
            "weight_version": versions[-1][0],
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(versions, ends, strict=True)
            ],
        }
        if self.finish_reason != ABORTED_WAITING:
            meta |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "num_retractions": self.retractions,
            }
        if self.wire.return_logprob:
            output = zip(self.logprobs, output_ids, strict=True)
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in self.prompt_logprobs]
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in output]
            meta["output_token_logprobs_length"] = len(output_ids)
        return {"text": self._text(output_ids, decode), "output_ids": output_ids, "meta_info": meta}

    def _stop(self, decode: Callable[[Sequence[int]], str]) -> str | None:
        longest = max(map(len, self.wire.stop))
        text = decode(self.tokens[max(self.prompt_tokens, len(self.tokens) - longest - _TAIL_TOKENS) :])
        return next((stop for stop in self.wire.stop if stop in text), None)

    def _text(self, output_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """The output as text, without what ended it unless the request keeps that."""
        matched = None if self.wire.no_stop_trim or self.finish_reason is None else self.finish_reason.get("matched")
        text = decode(output_ids[:-1] if isinstance(matched, int) else output_ids)
        return text.partition(matched)[0] if isinstance(matched, str) else text
