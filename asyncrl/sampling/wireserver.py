"""SGLang's wire format (0.5.23) as a server speaks it: checked requests out of JSON bodies, replies, and refusals.

For our own servers, the embedded and the scripted one: one prompt, one sample, no stream. What SGLang does beyond that
they refuse, with its status and the shape of its bodies.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from asyncrl.sampling.wire import error_text

__all__ = ["GenerateRequest", "WireError", "bad_request", "bad_value", "generate_reply", "parse_generate"]


class WireError(Exception):
    """An error reply: its status and its JSON body."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(error_text(status, orjson.dumps(body)))
        self.status = status
        self.body = body


def bad_value(message: str) -> WireError:
    """A refusal in the form that SGLang uses for values and state."""
    return WireError(400, {"error": {"message": message}})


def bad_request(message: str) -> WireError:
    """A refusal in the form that SGLang uses for bodies that it cannot read."""
    return WireError(400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """A checked ``/generate`` body: one prompt, one sample, no stream."""

    rid: str
    input_ids: Sequence[int]
    return_logprob: bool
    logprob_start_len: int
    lora_path: str | None
    extra_key: str
    cache_salt: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    no_stop_trim: bool
    skip_special_tokens: bool
    sampling_seed: int | None


_SAMPLING: Mapping[str, tuple[tuple[type, ...], Any]] = {
    "max_new_tokens": ((int,), 128),
    "temperature": ((int, float), 1.0),
    "top_p": ((int, float), 1.0),
    "top_k": ((int,), -1),
    "min_p": ((int, float), 0.0),
    "stop": ((str, list), []),
    "stop_token_ids": ((list,), []),
    "ignore_eos": ((bool,), False),
    "no_stop_trim": ((bool,), False),
    "skip_special_tokens": ((bool,), True),
    "sampling_seed": ((int,), None),
}
# Key -> types of its value, and the default, which null means too.
# Known to SGLang, and without effect on the ids that are sampled here at these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True, False),
    "n": (1,),
    "min_new_tokens": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "stream_interval": (1,),
}


def parse_generate(content: bytes) -> GenerateRequest:
    """Read and check a ``/generate`` body. Raises ``WireError`` with SGLang's status and body shape."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise bad_request("the body must be an object")
    if body.get("stream"):
        raise bad_value("stream is not supported by the embedded server")
    ids = body.get("input_ids")
    if ids is None:
        raise bad_value(
            "Either text, input_ids or input_embeds should be provided (the embedded server takes input_ids)."
        )
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise bad_value("input_ids must be one list of integers that is not empty")
    return GenerateRequest(
        rid=_typed(body, "rid", str) or uuid.uuid4().hex,
        input_ids=ids,
        return_logprob=_typed(body, "return_logprob", bool) or False,
        logprob_start_len=_typed(body, "logprob_start_len", int, -1),
        lora_path=_typed(body, "lora_path", str),
        extra_key=_typed(body, "extra_key", str) or "",
        cache_salt=_typed(body, "cache_salt", str) or "",
        **_sampling_params(_typed(body, "sampling_params", dict) or {}),
    )


def generate_reply(  # noqa: PLR0913  the parts of a reply
    request: GenerateRequest,
    *,
    text: str,
    output_ids: Sequence[int],
    logprobs: Sequence[float],
    prompt_logprobs: Sequence[tuple[float | None, int]],
    finish_reason: Mapping[str, Any],
    weight_version: str,
    versions: Sequence[tuple[str, int]],
    cached_tokens: int,
    retractions: int,
) -> dict[str, Any]:
    """The 200 reply; ``versions`` are (label, first output token under it)."""
    starts = [start for _, start in versions] or [0]
    labels = [label for label, _ in versions] or [weight_version]
    ends = [*starts[1:], len(output_ids)]
    spans = [
        {"version": label, "start": start, "end": end} for label, start, end in zip(labels, starts, ends, strict=True)
    ]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish_reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(output_ids),
        "cached_tokens": cached_tokens,
        "num_retractions": retractions,
        "weight_version": labels[-1],
        "weight_versions": spans,
    }
    if request.return_logprob:
        meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in prompt_logprobs]
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(logprobs, output_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = len(output_ids)
    return {"text": text, "output_ids": list(output_ids), "meta_info": meta}


def _typed(body: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    value = body.get(key, default)
    if value is not None and type(value) is not kind:
        raise WireError(400, {"error": f"{key}: expected {kind.__name__}, got {value!r}"})
    return default if value is None else value


def _sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    for key in params:
        if key not in _SAMPLING and key not in _NEUTRAL:
            known = ", ".join(sorted([*_SAMPLING, *_NEUTRAL]))
            raise WireError(400, {"error": f"unknown field `{key}`, expected one of {known}"})
    for key, allowed in _NEUTRAL.items():
        if params.get(key) is not None and params[key] not in allowed:
            raise bad_value(f"{key} is {params[key]!r}, which the embedded server does not support")
    read: dict[str, Any] = {}
    for key, (kinds, default) in _SAMPLING.items():
        value = params.get(key)
        if value is not None and type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise WireError(400, {"error": f"sampling_params.{key}: expected {expected}, got {value!r}"})
        read[key] = default if value is None else value
    stop = read["stop"]
    read["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    read["stop_token_ids"] = tuple(read["stop_token_ids"])
    _check_params(read)
    return read


def _check_params(params: Mapping[str, Any]) -> None:
    rules: Mapping[str, tuple[bool, str]] = {
        "max_new_tokens": (params["max_new_tokens"] >= 0, "at least 0"),
        "temperature": (math.isfinite(params["temperature"]) and params["temperature"] >= 0, "finite, at least 0"),
        "top_p": (0 < params["top_p"] <= 1, "in (0, 1]"),
        "top_k": (params["top_k"] == -1 or params["top_k"] >= 1, "-1 (disable) or at least 1"),
        "min_p": (0 <= params["min_p"] <= 1, "in [0, 1]"),
        "stop": (all(isinstance(text, str) and text for text in params["stop"]), "strings that are not empty"),
        "stop_token_ids": (all(type(token) is int for token in params["stop_token_ids"]), "integers"),
    }
    for key, (right, allowed) in rules.items():
        if not right:
            raise bad_value(f"{key} must be {allowed}, got {params[key]}.")
