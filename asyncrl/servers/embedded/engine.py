"""The embedded engine: schedule, run, postprocess, one step at a time. Synchronous; ``service`` gives it a loop.

A step is one forward pass: a prefill of waiting requests if there are any that fit, else one more token for every
running request. When the KV pool is full the youngest running request is retracted: it waits again with the tokens
that it has.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.servers.embedded.cache import PrefixCache
from asyncrl.servers.embedded.model import Adapter, DecoderModel, ForwardBatch
from asyncrl.servers.embedded.request import Request
from asyncrl.servers.embedded.sampling import draw, uniform
from asyncrl.servers.generation import ABORTED, ABORTED_WAITING

__all__ = ["Engine"]

_PREFILL_TOKENS = 2048
# New tokens in one prefill, padding included: bounds how long decoding waits for it.
_ALIKE_TOKENS = 8
# Requests whose uncached tokens are the same that far are taken for siblings: waiting for less is not worth a pass.


class Engine:
    """Owns the requests and the KV pool. No method may run beside another one."""

    def __init__(
        self,
        model: DecoderModel,
        tokenizer: Any,
        *,
        max_running_requests: int,
        random_seed: int,
        label: str = "default",
    ) -> None:
        self.model = model
        self.label = label
        """Name of the weights that are loaded."""
        self.cache = PrefixCache(model.slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.sampled_tokens = 0
        """Of all requests, since it began."""
        self._tokenizer = tokenizer
        self._max_running_requests = max_running_requests
        self._random = random.Random(random_seed)
        self._passing: list[Request] = []
        # The requests of the pass that is being computed.
        self._suspects: set[int] = set()
        # Which requests may be the cause of a pass that failed, by ``id``; see ``recover``.

    @property
    def idle(self) -> bool:
        """Nothing to compute."""
        return not self.waiting and not self.running

    def add(self, requests: Iterable[Request]) -> None:
        """These wait from now on, behind those that do already."""
        self.waiting.extend(requests)

    def step(self) -> list[Request]:
        """One forward pass. Returns the requests that ended in it. If it raises, ``recover`` is next."""
        prefill = self._schedule_prefill()
        self._passing = prefill or self.running
        if prefill:
            return self._prefill(prefill)
        self._make_room()
        self._passing = list(self.running)
        return self._decode() if self.running else []

    def recover(self, error: Exception) -> list[Request]:
        """After a step that raised: no request is lost but the one that it is about. Returns those that ended.

        If several were in the pass, requests are computed one by one until one of these is found to be the cause, or
        all have ended. The cache is forgotten, because nobody knows what of it is right.
        """
        passing, self._passing = self._passing, []
        ended = [request for request in passing if request.finish_reason is not None]
        involved = [request for request in passing if request.finish_reason is None]
        if not passing and self.waiting:
            involved = [self.waiting.popleft()]
        if len(involved) == 1:
            involved[0].failure = f"{type(error).__name__}: {error}"
            involved[0].finish_reason = ABORTED
        others = [request for request in [*involved, *self.running] if request.finish_reason is None]
        for request in [*ended, *involved, *self.running]:
            request.node, request.slots, request.cached = None, array("q"), 0
        self.running.clear()
        self.cache = PrefixCache(self.model.slots)
        self.waiting.extendleft(reversed(list(dict.fromkeys(others))))
        self._suspects = {id(request) for request in involved} if len(involved) > 1 else set()
        return [*ended, *(request for request in involved if request.failure)]

    def abort(self, rid: str) -> list[Request]:
        """End a request with what it has; an unknown one is nothing."""
        return [self._abort(request) for request in [*self.waiting, *self.running] if request.wire.rid == rid]

    def abort_all(self) -> list[Request]:
        """End every request with what it has."""
        return [self._abort(request) for request in [*self.waiting, *self.running]]

    def retract_all(self) -> None:
        """Send every running request back to wait; its context is computed again later."""
        while self.running:
            self._retract(self.running[-1])

    def flush(self, *, ignore_waiting: bool) -> bool:
        """Forget the prefix cache; False, and nothing happens, while requests run or, unless ignored, wait."""
        if self.running or (self.waiting and not ignore_waiting):
            return False
        self.cache.clear()
        return True

    def load_weights(self, weights: Path | Mapping[str, torch.Tensor] | None, label: str | None) -> None:
        """Replace all weights from a folder, or some by name, and their label; None keeps what is.

        What is in the KV pool stays; see ``flush``.
        """
        if isinstance(weights, Path):
            self.model.load_weights(weights)
        elif weights is not None:
            self.model.replace(weights)
        self.label = self.label if label is None else label

    # -- schedule ---------------------------------------------------------------------------------------------------

    def _schedule_prefill(self) -> list[Request]:
        """Waiting requests that fit, oldest first, with their cached prefix and their slots."""
        chosen: list[Request] = []
        beginnings: set[tuple[Any, ...]] = set()
        longest = 0
        skipped: deque[Request] = deque()
        while self.waiting and len(self.running) + len(chosen) < self._max_running_requests:
            if self._suspects and (self.running or chosen):
                break
            request = self.waiting.popleft()
            self._find_prefix(request)
            new = request.tokens[len(request.slots) :]
            beginning = (request.namespace, len(request.slots), *new[:_ALIKE_TOKENS])
            too_long = chosen and max(longest, len(new)) * (len(chosen) + 1) > _PREFILL_TOKENS
            if len(new) > _ALIKE_TOKENS and beginning in beginnings:
                # A sibling with the same prompt is in this pass: the next pass finds its prefix in the cache.
                self._forget_prefix(request)
                skipped.append(request)
                continue
            slots = None if too_long else self.cache.allocate(len(new))
            if slots is None:
                self._forget_prefix(request)
                self.waiting.appendleft(request)
                break
            request.slots.extend(slots)
            beginnings.add(beginning)
            longest = max(longest, len(new))
            chosen.append(request)
        self.waiting.extendleft(reversed(skipped))
        if not chosen and not self.running and self.waiting:
            raise RuntimeError("a request does not fit into the KV pool although nothing else is in it")
        return chosen

    def _find_prefix(self, request: Request) -> None:
        request.node, slots = self.cache.match(request.namespace, request.tokens[: request.cacheable])
        request.slots = array("q", slots)
        request.cached = len(slots)
        if not request.prefilled:
            request.cached_tokens = len(slots)

    def _forget_prefix(self, request: Request) -> None:
        self.cache.unlock(request.node)
        request.node, request.slots, request.cached = None, array("q"), 0

    def _make_room(self) -> None:
        """A slot for the next token of every running request, at the cost of the youngest ones if need be."""
        for request in list(self.running):
            while request in self.running:
                slots = self.cache.allocate(1)
                if slots is not None:
                    request.slots.extend(slots)
                    break
                self._retract(self.running[-1])

    def _retract(self, request: Request) -> None:
        self.running.remove(request)
        self._keep_prefix(request)
        self._forget_prefix(request)
        request.retractions += 1
        self.waiting.appendleft(request)

    # -- run ----------------------------------------------------------------------------------------------------------

    def _prefill(self, requests: list[Request]) -> list[Request]:
        starts = [request.cached for request in requests]
        hidden = self._forward(requests, starts)
        last = [len(request.tokens) - start - 1 for request, start in zip(requests, starts, strict=True)]
        for row, (request, start) in enumerate(zip(requests, starts, strict=True)):
            if request.wire.logprob_start_len >= 0 and not request.prefilled:
                self._score_prompt(request, start, hidden[row])
            request.prefilled = True
            self._keep_prefix(request)
        self.running += requests
        scoring = [request for request in requests if request.max_new_tokens == 0]
        for request in scoring:
            request.finish_reason = {"type": "length", "length": 0}
            self._leave(request)
        rows = [row for row, request in enumerate(requests) if request.max_new_tokens > 0]
        if not rows:
            return scoring
        drawn = [requests[row] for row in rows]
        return scoring + self._draw(drawn, hidden[rows, [last[row] for row in rows]])

    def _decode(self) -> list[Request]:
        requests = list(self.running)
        hidden = self._forward(requests, [len(request.tokens) - 1 for request in requests])
        return self._draw(requests, hidden[:, -1])

    def _forward(self, requests: Sequence[Request], starts: Sequence[int]) -> torch.Tensor:
        """(B, Q, D) hidden states of each request's tokens from its start on."""
        first = np.array(starts)
        counts = np.array([len(request.tokens) for request in requests]) - first
        ids = np.zeros((len(requests), counts.max()), dtype=np.int64)
        slots = np.zeros((len(requests), (first + counts).max()), dtype=np.int64)
        new_slots = array("q")
        for row, (request, start, count) in enumerate(zip(requests, starts, counts, strict=True)):
            ids[row, :count] = request.tokens[start:]
            slots[row, : start + count] = request.slots
            new_slots.extend(request.slots[start:])
        steps = np.arange(ids.shape[1])
        new_tokens = None if len(new_slots) == ids.size else np.flatnonzero(steps < counts[:, None])
        device = self.model.device
        return self.model.forward(
            ForwardBatch(
                input_ids=torch.from_numpy(ids).to(device),
                positions=torch.from_numpy(first[:, None] + steps).to(device),
                new_tokens=None if new_tokens is None else torch.from_numpy(new_tokens).to(device),
                context_slots=torch.from_numpy(slots).to(device),
                new_slots=torch.tensor(new_slots, device=device),
                adapters=_adapter_rows(requests, device),
            )
        )

    def _score_prompt(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        """Log-probabilities of the prompt from ``logprob_start_len`` on, never divided by the temperature."""
        first = request.wire.logprob_start_len
        targets = request.tokens[first : request.prompt_tokens]
        if len(targets) > 1:
            states = hidden[first - start : request.prompt_tokens - 1 - start]
            logprobs = torch.log_softmax(self.model.logits(states), dim=-1)
            wanted = torch.tensor(targets[1:], device=logprobs.device)
            scores = logprobs.gather(-1, wanted[:, None]).squeeze(-1).tolist()
            request.prompt_logprobs = list(zip([None, *scores], targets, strict=True))
        else:
            request.prompt_logprobs = [(None, token) for token in targets]

    # -- postprocess --------------------------------------------------------------------------------------------------

    def _draw(self, requests: Sequence[Request], hidden: torch.Tensor) -> list[Request]:
        uniforms = [self._uniform(request) for request in requests]
        tokens, logprobs = draw(self.model.logits(hidden), [request.wire for request in requests], uniforms)
        self.sampled_tokens += len(requests)
        ended = []
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.append(token, logprob, self.label, self._tokenizer.decode)
            if request.finish_reason is not None:
                self._leave(request)
                ended.append(request)
        return ended

    def _uniform(self, request: Request) -> float:
        seed = request.wire.sampling_seed
        return self._random.random() if seed is None else uniform(seed, request.output_tokens)

    def _keep_prefix(self, request: Request) -> None:
        """Put what is computed into the trie, for siblings and for the next turn."""
        computed = len(request.slots)
        node, slots = self.cache.insert(
            request.namespace, request.tokens[:computed], request.slots, owned_from=request.cached
        )
        self.cache.unlock(request.node)
        request.node, request.slots, request.cached = node, array("q", slots), len(slots)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._suspects.discard(id(request))
        self._keep_prefix(request)
        self._forget_prefix(request)

    def _abort(self, request: Request) -> Request:
        if request in self.running:
            request.finish_reason = ABORTED
            self._leave(request)
        else:
            request.finish_reason = ABORTED_WAITING
            self.waiting.remove(request)
            self._suspects.discard(id(request))
        return request


def _adapter_rows(requests: Sequence[Request], device: torch.device) -> list[tuple[Adapter, torch.Tensor | None]]:
    rows: dict[int, tuple[Adapter, list[int]]] = {}
    for row, request in enumerate(requests):
        if request.adapter is not None:
            rows.setdefault(request.adapter.uid, (request.adapter.weights, []))[1].append(row)
    return [
        (adapter, None if len(used) == len(requests) else torch.tensor(used, device=device))
        for adapter, used in rows.values()
    ]
