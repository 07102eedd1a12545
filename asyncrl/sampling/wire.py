"""SGLang's wire format (0.5.23) as a client speaks it: requests to JSON bodies, and replies to segments.

The server's half is ``wireserver``. A reply that breaks an invariant is refused, never repaired: ids and
log-probabilities are what the server sent, or nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson

from asyncrl.errors import ProtocolError
from asyncrl.sampling.base import SegmentRequest
from asyncrl.types import Segment, StopReason, VersionSpan

__all__ = ["PauseMode", "error_text", "generate_body", "parse_segment"]

PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]
"""What a pause does to running requests: end them with what they have, compute them again later, or freeze them."""

_ERROR_KEYS = ("error", "error_message", "message", "detail")


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
    body: Mapping[str, Any], *, request: SegmentRequest, server: str = "", in_place: bool = False
) -> Segment:
    """The segment in a 200 reply. ``in_place``: weights may change under a running request, which shifts spans by one.

    Raises ``ProtocolError`` if ids and log-probabilities are missing, do not match, or name an unknown version.
    """
    try:
        meta = body["meta_info"]
        ids = list(body["output_ids"])
        entries = meta.get("output_token_logprobs") or []
        values, named = [entry[0] for entry in entries], [entry[1] for entry in entries]
        versions = _versions(meta, len(ids), request, in_place=in_place)
        reason = meta["finish_reason"]
        completion = meta.get("completion_tokens", len(ids))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ProtocolError(f"the reply is not one of a generation ({error!r}): {str(body)[:500]}") from error
    if not len(ids) == completion == len(entries):
        raise ProtocolError(
            f"the reply has {len(ids)} ids, {len(entries)} log-probabilities and completion_tokens {completion}"
        )
    if ids != named:
        raise ProtocolError("the reply's ids are not the ids of its log-probabilities")
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
        raise ProtocolError("the reply has a log-probability that is not a finite number")
    return Segment(
        tokens=np.array(ids, dtype=np.int32),
        logprobs=np.array(values, dtype=np.float32),
        versions=versions,
        stop=_stop_reason(reason),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        server=server,
    )


def error_text(status: int, content: bytes) -> str:
    """The message of an error reply, whichever of the server's body shapes it has."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return f"status {status}: {content[:500].decode(errors='replace')}"
    if isinstance(body, Mapping):
        error = next((body[key] for key in _ERROR_KEYS if key in body), body)
        if isinstance(error, Mapping):
            error = error.get("message", error)
        return f"status {status}: {error}"
    return f"status {status}: {body}"


def _stop_reason(reason: Any) -> StopReason:
    if not isinstance(reason, Mapping):
        raise ProtocolError(f"the reply's finish_reason is {reason!r}")
    if reason.get("matched") == "NaN happened":
        raise ProtocolError("the server's logits were not numbers")
    try:
        return StopReason(reason["type"])
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"the reply's finish_reason is {reason!r}") from error


def _versions(
    meta: Mapping[str, Any], tokens: int, request: SegmentRequest, *, in_place: bool
) -> tuple[VersionSpan, ...]:
    """Spans by policy version, as the server reports them for each token."""
    if not tokens:
        return ()
    if request.adapter is not None:
        # The label is that of the base weights; the adapter's name is the version.
        return (VersionSpan(version=request.version, start=0, end=tokens),)
    spans = meta.get("weight_versions")
    if not spans:
        # Only the label at the end is known, and that may be newer than the tokens: of it and the stamp at dispatch
        # the older counts.
        label = min(request.version, _label(meta.get("weight_version")))
        return (VersionSpan(version=label, start=0, end=tokens),)
    labels = _per_token(spans, tokens)
    if in_place:
        # The step that was under way at the switch used the old weights, but is reported as the new version's.
        labels = [min(labels[max(0, i - 1)], label) for i, label in enumerate(labels)]
    return _spans(labels)


def _per_token(spans: Sequence[Mapping[str, Any]], tokens: int) -> list[int]:
    labels: list[int] = []
    for span in spans:
        if span["start"] != len(labels):
            raise ProtocolError(f"the reply's weight_versions {spans} leave a gap at {len(labels)}")
        labels += [_label(span["version"])] * (span["end"] - span["start"])
    if len(labels) != tokens:
        raise ProtocolError(f"the reply's weight_versions {spans} do not cover {tokens} tokens")
    return labels


def _label(label: object) -> int:
    if not str(label).isdecimal():
        raise ProtocolError(f"the reply was sampled by weights {label!r}, which are no version of ours")
    return int(str(label))


def _spans(labels: Sequence[int]) -> tuple[VersionSpan, ...]:
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    ends = [*starts[1:], len(labels)]
    return tuple(
        VersionSpan(version=labels[start], start=start, end=end) for start, end in zip(starts, ends, strict=True)
    )
