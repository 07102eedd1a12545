"""What servers answer on their control routes, read strictly: a value of another kind than promised is never used.

Every function takes a decoded body and returns a checked value, or raises ``ProtocolError`` with the field and what was
in it. Sampling replies are read in ``wire``; what is done with the values is the callers' business.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.errors import ProtocolError
from asyncrl.types import FloatArray

__all__ = ["Load", "adapter_names", "context_of", "integer", "parse_load", "ranks_of", "scored", "shown"]

MOST = 2**53
"""No count is larger; a float can still tell it from its neighbours."""
_MOST_RANKS = 1024
_SHOWN_CHARACTERS = 300
_RESERVED_TOKENS = 6
# The server refuses a prompt that leaves fewer than these of its context or its KV memory.
_ROUNDING = 1e-3
# A sum of probabilities may come out a little over one.

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple = 4, 12, 12, 12
_short.maxstring, _short.maxlong, _short.maxother = 120, 60, 60


def shown(value: object) -> str:
    """A value as part of a message: short, however long, deep or odd it is."""
    try:
        return _short.repr(value)[:_SHOWN_CHARACTERS]
    except ValueError:  # an integer of thousands of digits has no repr
        return f"a value of type {type(value).__name__}"


def integer(value: object, field: str, *, least: int = 0, most: int = MOST) -> int:
    """``value``, if it is an integer from ``least`` to ``most``: no truth value, no float that equals one, no text."""
    if type(value) is int and least <= value <= most:
        return value
    raise ProtocolError(f"{field} is {shown(value)}, but must be an integer from {least} to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a server has to do, of ours and of others."""

    running: int
    waiting: int
    kv_usage: float | None = None
    """Share of the KV memory that running requests take; None if the server does not tell."""
    most_running: int | None = None
    """Requests that it runs at once if memory allows; None if it does not tell."""
    tokens_per_second: float | None = None
    """What all running requests together get; None if the server does not tell."""

    @property
    def seconds_per_token(self) -> float | None:
        """What one running request waits for a token; None if that is not known."""
        if not self.tokens_per_second or not self.running:
            return None
        return self.running / self.tokens_per_second


def parse_load(reply: Mapping[str, Any]) -> Load:
    """The load in a reply of ``/v1/loads``, over all its ranks."""
    ranks = _objects(reply.get("loads") if isinstance(reply, Mapping) else None, "loads")
    if not ranks:
        raise ProtocolError("loads is [], but must have an entry for each rank")
    usages = [usage for rank in ranks if (usage := _number(rank, "token_usage")) is not None]
    paces = [pace for rank in ranks if (pace := _number(rank, "gen_throughput")) is not None]
    most_running = sum(_count(rank, "max_running_requests", missing=0) for rank in ranks)
    return Load(
        running=sum(_count(rank, "num_running_reqs") for rank in ranks),
        waiting=sum(_count(rank, "num_waiting_reqs") for rank in ranks),
        kv_usage=max(usages, default=None),
        # Zero, from ranks that do not tell, is no number of requests.
        most_running=most_running or None,
        tokens_per_second=sum(paces) if paces else None,
    )


def adapter_names(reply: Mapping[str, Any]) -> set[str]:
    """The names of adapters in a reply of ``/v1/models``: models that have another one as their parent."""
    names = [model.get("id") for model in _objects(reply.get("data", []), "data") if model.get("parent")]
    for name in names:
        if not isinstance(name, str):
            raise ProtocolError(f"data has a model whose id is {shown(name)}, but must be a text")
    return {str(name) for name in names}


def context_of(info: Mapping[str, Any]) -> int | None:
    """The context in a reply of ``/server_info``; None if it does not say.

    A server of 2,048 positions and 16,384 KV slots says ``max_req_input_len`` 2,042 or ``context_length`` 2,048: 2,042.
    """
    told = (
        ("max_req_input_len", 0),
        ("context_length", _RESERVED_TOKENS),
        ("max_total_num_tokens", _RESERVED_TOKENS),
    )
    found = [integer(info[key], key, least=1) - reserved for key, reserved in told if info.get(key) is not None]
    if not found:
        return None
    if min(found) < 1:
        raise ProtocolError(f"the server has room for {min(found)} tokens, which is none: {shown(info)}")
    return min(found)


def ranks_of(info: Mapping[str, Any]) -> int:
    """The tensor-parallel ranks in a reply of ``/server_info``."""
    size = info.get("tp_size")
    return 1 if size is None else integer(size, "tp_size", least=1, most=_MOST_RANKS)


def scored(reply: object, ids: Sequence[int]) -> FloatArray:
    """The log-probabilities of ``ids`` in a reply that scored a prompt from one token before them."""
    try:
        entries = reply["meta_info"]["input_token_logprobs"][1:]  # type: ignore[index]
        values, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
    except (KeyError, TypeError, IndexError) as error:
        raise ProtocolError(f"the reply did not score a prompt ({error!r}): {shown(reply)}") from error
    if not all(type(token) is int for token in named) or named != list(ids):
        raise ProtocolError(f"the reply scored other tokens than were sent: {shown(named)}")
    for value in values:
        if type(value) not in (int, float) or not -math.inf < value <= _ROUNDING:
            raise ProtocolError(f"input_token_logprobs has {shown(value)}, but must have log-probabilities")
    return np.array(values, dtype=np.float32)


def _objects(value: object, field: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ProtocolError(f"{field} is {shown(value)}, but must be a list of objects")
    return value


def _count(rank: Mapping[str, Any], key: str, *, missing: int | None = None) -> int:
    if rank.get(key) is None and missing is not None:
        return missing
    return integer(rank.get(key), key)


def _number(rank: Mapping[str, Any], key: str) -> float | None:
    value = rank.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < MOST:
        raise ProtocolError(f"{key} is {shown(value)}, but must be a number from 0 to {MOST}")
    return float(value)
