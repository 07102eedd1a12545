"""The embedded engine: schedule, run, postprocess, one step at a time. Synchronous; ``service`` gives it a loop.

A step is one forward pass: a prefill of waiting requests if there are any that fit, else one more token for every
running request. When the KV pool is full the youngest running request is retracted: it waits again with the tokens
that it has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from asyncrl.sampling.embedded.cache import PrefixCache
from asyncrl.sampling.embedded.model import Adapter, DecoderModel, ForwardBatch
from asyncrl.sampling.embedded.request import Request
from asyncrl.sampling.embedded.sampling import draw, uniform

__all__ = ["Engine", "PauseMode"]

PauseMode = Literal["abort", "retract", "in_place"]
_PREFILL_TOKENS = 2048
# New tokens in one prefill, padding included: bounds how long decoding waits for it.
_TAIL_TOKENS = 8
# A stop string can begin inside a token and end inside a later one; looking this much further back finds it.


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
        self._tokenizer = tokenizer
        self._max_running_requests = max_running_requests
        self._random = random.Random(random_seed)

    @property
    def idle(self) -> bool:
        """Nothing to compute."""
        return not self.waiting and not self.running

    def step(self) -> list[Request]:
        """One forward pass. Returns the requests that ended in it."""
        prefill = self._schedule_prefill()
        if prefill:
            return self._prefill(prefill)
        self._make_room()
        return self._decode() if self.running else []

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

    def flush(self) -> None:
        """Forget the prefix cache."""
        self.cache.clear()

    # -- schedule ---------------------------------------------------------------------------------------------------

    def _schedule_prefill(self) -> list[Request]:
        """Waiting requests that fit, oldest first, with their cached prefix and their slots."""
        chosen: list[Request] = []
        beginnings: set[tuple[Any, ...]] = set()
        longest = 0
        skipped: deque[Request] = deque()
        while self.waiting and len(self.running) + len(chosen) < self._max_running_requests:
            request = self.waiting.popleft()
            self._find_prefix(request)
            new = len(request.tokens) - len(request.slots)
            beginning = (request.namespace, len(request.slots), *request.tokens[len(request.slots) :][:_TAIL_TOKENS])
            too_long = chosen and max(longest, new) * (len(chosen) + 1) > _PREFILL_TOKENS
            if beginning in beginnings and request.wire.logprob_start_len < 0:
                # A sibling with the same prompt is in this pass: the next pass finds its prefix in the cache.
                self._forget_prefix(request)
                skipped.append(request)
                continue
            slots = None if too_long else self.cache.allocate(new)
            if slots is None:
                self._forget_prefix(request)
                self.waiting.appendleft(request)
                break
            request.slots += slots
            beginnings.add(beginning)
            longest = max(longest, new)
            chosen.append(request)
        self.waiting.extendleft(reversed(skipped))
        if not chosen and not self.running and self.waiting:
            raise RuntimeError("a request does not fit into the KV pool although nothing else is in it")
        return chosen

    def _find_prefix(self, request: Request) -> None:
        # The last token is computed anew, because its hidden state is what the next token is drawn from.
        usable = len(request.tokens) - 1
        if request.wire.logprob_start_len >= 0:
            usable = min(usable, request.wire.logprob_start_len)
        request.node, slots = self.cache.match(request.namespace, request.tokens[:usable])
        request.slots = list(slots)
        request.cached = len(slots)
        if not request.prefilled:
            request.cached_tokens = len(slots)

    def _forget_prefix(self, request: Request) -> None:
        self.cache.unlock(request.node)
        request.node, request.slots, request.cached = None, [], 0

    def _make_room(self) -> None:
        """A slot for the next token of every running request, at the cost of the youngest ones if need be."""
        for request in list(self.running):
            while request in self.running:
                slots = self.cache.allocate(1)
                if slots is not None:
                    request.slots += slots
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
        lengths = [len(request.tokens) for request in requests]
        queries = max(length - start for length, start in zip(lengths, starts, strict=True))
        context = max(lengths)
        ids, positions, slots, new_slots = [], [], [], []
        for request, start, length in zip(requests, starts, lengths, strict=True):
            padding = [0] * (queries - length + start)
            ids.append(request.tokens[start:] + padding)
            positions.append([*range(start, length), *padding])
            slots.append(request.slots + [0] * (context - length))
            new_slots += request.slots[start:]
        device = self.model.device
        counts = torch.tensor([length - start for length, start in zip(lengths, starts, strict=True)], device=device)
        return self.model.forward(
            ForwardBatch(
                input_ids=torch.tensor(ids, device=device),
                positions=torch.tensor(positions, device=device),
                valid=torch.arange(queries, device=device)[None] < counts[:, None],
                context_slots=torch.tensor(slots, device=device),
                new_slots=torch.tensor(new_slots, device=device),
                adapters=_adapter_rows(requests, device),
            )
        )

    def _score_prompt(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        """Log-probabilities of the prompt from ``logprob_start_len`` on, never divided by the temperature."""
        first = request.wire.logprob_start_len
        states = hidden[first - start : request.prompt_tokens - 1 - start]
        targets = request.tokens[first + 1 : request.prompt_tokens]
        logprobs = torch.log_softmax(self.model.logits(states), dim=-1)
        chosen = logprobs[torch.arange(len(targets)), torch.tensor(targets, dtype=torch.long)].tolist()
        request.prompt_logprobs = [(None, request.tokens[first]), *zip(chosen, targets, strict=True)]

    # -- postprocess --------------------------------------------------------------------------------------------------

    def _draw(self, requests: Sequence[Request], hidden: torch.Tensor) -> list[Request]:
        uniforms = [self._uniform(request) for request in requests]
        tokens, logprobs = draw(self.model.logits(hidden), [request.wire for request in requests], uniforms)
        ended = []
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            request.append(token, logprob, self.label)
            request.finish_reason = self._finish_reason(request, token)
            if request.finish_reason is not None:
                self._leave(request)
                ended.append(request)
        return ended

    def _uniform(self, request: Request) -> float:
        seed = request.wire.sampling_seed
        return self._random.random() if seed is None else uniform(seed, request.output_tokens)

    def _finish_reason(self, request: Request, token: int) -> dict[str, Any] | None:
        if token in request.stop_ids:
            return {"type": "stop", "matched": token}
        if request.wire.stop:
            longest = max(map(len, request.wire.stop))
            tail = request.tokens[request.prompt_tokens :][-longest - _TAIL_TOKENS :]
            text = self._tokenizer.decode(tail)
            for stop in request.wire.stop:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if request.output_tokens >= request.max_new_tokens:
            return {"type": "length", "length": request.max_new_tokens}
        return None

    def _keep_prefix(self, request: Request) -> None:
        """Put what is computed into the trie, for siblings and for the next turn."""
        computed = len(request.slots)
        node, slots = self.cache.insert(
            request.namespace, request.tokens[:computed], request.slots, owned_from=request.cached
        )
        self.cache.unlock(request.node)
        request.node, request.slots, request.cached = node, slots, len(slots)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._keep_prefix(request)
        self._forget_prefix(request)

    def _abort(self, request: Request) -> Request:
        if request in self.running:
            request.finish_reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            self._leave(request)
        else:
            request.finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
            self.waiting.remove(request)
        return request

    def load_weights(self, path: Path, label: str | None) -> None:
        """Replace the weights. What is in the KV pool stays; see ``flush``."""
        self.model.load_weights(path)
        if label is not None:
            self.label = label


def _adapter_rows(requests: Sequence[Request], device: torch.device) -> list[tuple[Adapter, torch.Tensor | None]]:
    rows: dict[int, tuple[Adapter, list[int]]] = {}
    for row, request in enumerate(requests):
        if request.adapter is not None:
            rows.setdefault(request.adapter.uid, (request.adapter.adapter, []))[1].append(row)
    return [
        (adapter, None if len(used) == len(requests) else torch.tensor(used, device=device))
        for adapter, used in rows.values()
    ]
