"""SGLang's wire format (0.5.23) as a client speaks it: requests to JSON bodies, and replies to segments.

The server's half is ``wireserver``. A reply that breaks an invariant is refused, never repaired: ids and
log-probabilities are what the server sent, or nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson

from asyncrl.errors import ProtocolError
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.labels import Labels, WrongWeights
from asyncrl.sampling.replies import integer, shown
from asyncrl.types import FloatArray, IntArray, Segment, StopReason, VersionSpan

__all__ = ["PauseMode", "WrongWeights", "error_text", "generate_body", "parse_segment"]

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
"""What a pause does to running requests: end them with what they have, compute them again later, or freeze them."""

_INTEGER, _NUMBER = frozenset({int}), frozenset({int, float})
_ERROR_KEYS = ("error", "error_message", "message", "detail")
_ERROR_CHARACTERS = 1000
_ANY_ID = 2**31
_LOWEST = float(np.finfo(np.float32).min)
_ROUNDING = 1e-3
# A log-probability may come out a little over zero.


def generate_body(request: SegmentRequest, *, rid: str, max_new_tokens: int | None = None) -> dict[str, Any]:
    """The body of ``POST /generate``. Every key that matters is sent, so that a server's defaults do not.

    ``max_new_tokens``: instead of the request's, where the server has no room for those.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.input_ids,
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens if max_new_tokens is None else max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": 0.0,
            "stop": list(request.stop) or None,
            "stop_token_ids": list(request.stop_token_ids) or None,
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "sampling_seed": request.seed,
        },
        "return_logprob": True,
        "stream": False,
    }
    if request.adapter is not None:
        body["lora_path"] = request.adapter
    if request.extra_key:
        body["extra_key"] = request.extra_key
    return body


def parse_segment(
    body: Mapping[str, Any],
    *,
    request: SegmentRequest,
    server: str = "",
    in_place: bool = False,
    most_tokens: int | None = None,
    vocab_size: int | None = None,
    labels: Labels | None = None,
) -> Segment:
    """The segment in a 200 reply. ``in_place``: weights may change under a running request, which shifts spans by one.

    ``most_tokens``: what was asked for, if not what the request says. ``vocab_size``: ids from here on are none.
    ``labels``: whose versions are believed; None takes plain numbers.

    Raises ``ProtocolError`` if anything is missing or is no answer to the request, and ``WrongWeights`` if it was
    sampled by an unknown version, or by another one than only would do.
    """
    most = request.max_new_tokens if most_tokens is None else most_tokens
    try:
        meta = body["meta_info"]
        ids = body["output_ids"]
        entries = meta.get("output_token_logprobs") or []
        values, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
        completion = meta.get("completion_tokens", len(ids))
        reason = meta["finish_reason"]
        tokens = _tokens(ids, vocab_size)
        if len(ids) > most:
            raise ProtocolError(f"the reply has {len(ids)} ids, but {most} were asked for")
        versions = _versions(meta, len(ids), request, labels or Labels(), in_place=in_place)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ProtocolError(f"the reply is not one of a generation ({error!r}): {shown(body)}") from error
    if type(completion) is not int or not len(ids) == completion == len(entries):
        raise ProtocolError(
            f"the reply has {len(ids)} ids, {len(entries)} log-probabilities and completion_tokens {shown(completion)}"
        )
    if ids != named:
        raise ProtocolError("the reply's ids are not the ids of its log-probabilities")
    if request.replica and any(span.version != request.version for span in versions):
        raise WrongWeights(
            f"a request for version {request.version} was answered by {[span.version for span in versions]}"
        )
    cached = meta.get("cached_tokens")
    return Segment(
        tokens=tokens,
        logprobs=_logprobs(values),
        versions=versions,
        stop=_stop_reason(reason),
        cached_tokens=0 if cached is None else integer(cached, "the reply's cached_tokens"),
        server=server,
    )


def _tokens(ids: Any, vocab_size: int | None) -> IntArray:
    # All at once, here and below, for one by one this would be most of the work of a reply.
    if not isinstance(ids, list):
        raise ProtocolError(f"the reply's ids are {shown(ids)}, but must be a list")
    if not _INTEGER.issuperset(map(type, ids)):
        bad = next(token for token in ids if type(token) is not int)
        raise ProtocolError(f"the reply's ids have {shown(bad)}, which is no integer")
    top = _ANY_ID if vocab_size is None else vocab_size
    try:
        tokens: IntArray = np.array(ids, dtype=np.int32)
        # Without its sign a negative id is larger than any other.
        if not ids or int(np.maximum.reduce(tokens.view(np.uint32))) < top:
            return tokens
    except OverflowError:
        pass
    bad = next(token for token in ids if not 0 <= token < top)
    raise ProtocolError(f"the reply's ids have {shown(bad)}, which is outside of a vocabulary of {top} ids")


def _logprobs(values: Sequence[Any]) -> FloatArray:
    try:
        if _NUMBER.issuperset(map(type, values)):
            logprobs = np.array(values, dtype=np.float64)
            # Also false for what is no number.
            if not values or (np.minimum.reduce(logprobs) >= _LOWEST and np.maximum.reduce(logprobs) <= _ROUNDING):
                return logprobs.astype(np.float32)
    except OverflowError:
        pass
    bad = next(value for value in values if type(value) not in _NUMBER or not _LOWEST <= value <= _ROUNDING)
    if type(bad) in _NUMBER and 0 < bad <= -_LOWEST:
        raise ProtocolError(f"the reply has a log-probability of {shown(bad)}, which is a probability above 1")
    raise ProtocolError(f"the reply has a log-probability of {shown(bad)}, which is not a finite number of 32 bits")


def error_text(status: int, content: bytes) -> str:
    """The message of an error reply, whichever of the server's body shapes it has."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return f"status {status}: {content[:_ERROR_CHARACTERS].decode(errors='replace')}"
    if isinstance(body, Mapping):
        error = next((body[key] for key in _ERROR_KEYS if key in body), body)
        if isinstance(error, Mapping):
            error = error.get("message", error)
        body = error
    return f"status {status}: {body[:_ERROR_CHARACTERS] if isinstance(body, str) else shown(body)}"


def _stop_reason(reason: Any) -> StopReason:
    if not isinstance(reason, Mapping):
        raise ProtocolError(f"the reply's finish_reason is {shown(reason)}")
    if reason.get("matched") == "NaN happened":
        raise ProtocolError("the server's logits were not numbers")
    try:
        return StopReason(reason["type"])
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"the reply's finish_reason is {shown(reason)}") from error


def _versions(
    meta: Mapping[str, Any], tokens: int, request: SegmentRequest, labels: Labels, *, in_place: bool
) -> tuple[VersionSpan, ...]:
    """Spans by policy version, as the server reports them for each token."""
    if not tokens:
        return ()
    if request.adapter is not None:
        # The label is that of the base weights; the adapter's name is the version.
        for label in _reported(meta):
            labels.require_below(label)
        return (VersionSpan(version=request.version, start=0, end=tokens),)
    spans = meta.get("weight_versions")
    if not spans:
        # Only the label at the end is known, and that may be newer than the tokens: of it and the stamp at dispatch
        # the older counts.
        label = min(request.version, labels.version(meta.get("weight_version")))
        return (VersionSpan(version=label, start=0, end=tokens),)
    covering = _covering(spans, tokens, labels)
    return _merged(_shifted(covering, request.version) if in_place else covering)


def _reported(meta: Mapping[str, Any]) -> list[Any]:
    """All labels in a reply."""
    spans = meta.get("weight_versions")
    return [span["version"] for span in spans] if spans else [meta.get("weight_version")]


def _covering(spans: Sequence[Mapping[str, Any]], tokens: int, labels: Labels) -> list[VersionSpan]:
    """The reported spans, none of them empty. Raises ``ProtocolError`` unless they cover all tokens once."""
    found: list[VersionSpan] = []
    end = 0
    for span in spans:
        start, stop = span["start"], span["end"]
        if type(start) is not int or type(stop) is not int:
            raise ProtocolError(f"the reply's weight_versions have a span {shown(span)}, which is not of integers")
        if start != end or stop < end:
            raise ProtocolError(f"the reply's weight_versions {shown(spans)} leave a gap at {end}")
        if stop > end:
            found.append(VersionSpan(version=labels.version(span["version"]), start=end, end=stop))
        end = stop
    if end != tokens:
        raise ProtocolError(f"the reply's weight_versions {shown(spans)} do not cover {tokens} tokens")
    return found


def _shifted(spans: Sequence[VersionSpan], stamp: int) -> list[VersionSpan]:
    """The step that was under way at a switch used the old weights, but is reported as the new version's.

    Version 1 for tokens 0 to 3 and version 2 for 4 to 9 becomes 1 for 0 to 4 and 2 for 5 to 9. That step may have been
    the request's first: a request stamped 1 with version 2 for 0 to 9 becomes 1 for 0 and 2 for 1 to 9.
    """
    found: list[VersionSpan] = []
    dispatched = VersionSpan(version=stamp, start=0, end=0)
    for before, span in pairwise([dispatched, *spans]):
        late = span.start + (before.version < span.version)
        if late > span.start:
            found.append(VersionSpan(version=before.version, start=span.start, end=late))
        if late < span.end:
            found.append(VersionSpan(version=span.version, start=late, end=span.end))
    return found


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    merged = list(spans[:1])
    for span in spans[1:]:
        if span.version == merged[-1].version:
            merged[-1] = VersionSpan(version=span.version, start=merged[-1].start, end=span.end)
        else:
            merged.append(span)
    return tuple(merged)
