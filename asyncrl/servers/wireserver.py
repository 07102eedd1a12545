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

from asyncrl.sampling.replies import shown
from asyncrl.sampling.wire import error_text

__all__ = [
    "GenerateRequest",
    "ServerLimits",
    "WireError",
    "adapter_error",
    "adapters_reply",
    "bad_request",
    "bad_value",
    "field",
    "parse_body",
    "parse_generate",
    "update_error",
]

_SPARE_TOKENS = 5
# Prompts must stay further than this from one token less than what fits.
_UNUSED_TOKENS = 2
_WITHOUT_LIMITS = 256
# Tokens of a request that asks for as many as fit where there is no limit.
_MOST_STOPS = 32
_SHOWN = 100


class WireError(Exception):
    """An error reply: its status and its body, an object or a text."""

    def __init__(self, status: int, body: Mapping[str, Any] | str) -> None:
        super().__init__(error_text(status, orjson.dumps(body)))
        self.status = status
        self.body: Any = body


def bad_value(message: str) -> WireError:
    """A refusal in the form that SGLang uses for values and state."""
    return WireError(400, {"error": {"message": message}})


def bad_request(message: str) -> WireError:
    """A refusal in the form that SGLang uses for bodies that it cannot read."""
    return WireError(400, {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def update_error(message: str) -> WireError:
    """A refusal in the form that SGLang uses for weights."""
    return WireError(400, {"success": False, "message": message})


def adapter_error(message: str, loaded: Mapping[str, str] | None) -> WireError:
    """A refusal in the form that SGLang uses for adapters; ``loaded`` are names and paths."""
    return WireError(400, adapters_reply(loaded) | {"success": False, "error_message": message})


def adapters_reply(loaded: Mapping[str, str] | None) -> dict[str, Any]:
    """The reply to loading and unloading: names and paths of what is loaded now."""
    return {
        "rid": None,
        "http_worker_ipc": None,
        "success": True,
        "error_message": "",
        "loaded_adapters": None if loaded is None else dict(loaded),
    }


def parse_body(content: bytes) -> Mapping[str, Any]:
    """A body that must be an object; nothing is an empty one."""
    try:
        body = orjson.loads(content) if content else {}
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise bad_request("the body must be an object")
    return body


def field(body: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """The value of ``key``, which must be of type ``kind``; ``default`` if it is missing or null.

    With ``default`` ``...`` it must be there.
    """
    value = body.get(key)
    if value is None and default is not ...:
        return default
    if type(value) is not kind:
        raise bad_request(f"{key}: expected {kind.__name__}, got {shown(value)}")
    return value


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
    max_new_tokens: int | None
    """None: as many as the context allows."""
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
# Below: known to SGLang, and without effect on the ids that are sampled here at these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True, False),
    "n": (0, 1),
    "min_new_tokens": (0,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "stream_interval": (1,),
}


def parse_generate(body: Mapping[str, Any]) -> GenerateRequest:
    """Check a ``/generate`` body. Raises ``WireError`` with SGLang's status and body shape."""
    outer = {
        "rid": field(body, "rid", str) or uuid.uuid4().hex,
        "return_logprob": field(body, "return_logprob", bool, False),
        "logprob_start_len": field(body, "logprob_start_len", int, -1),
        "lora_path": field(body, "lora_path", str),
        "extra_key": field(body, "extra_key", str, ""),
        "cache_salt": field(body, "cache_salt", str, ""),
    }
    if field(body, "stream", bool, False):
        raise bad_value("stream is not supported by this server")
    ids = _input_ids(body)
    return GenerateRequest(input_ids=ids, **outer, **_sampling_params(field(body, "sampling_params", dict, {})))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Sizes of a server. One that is None is not told, and refuses nothing."""

    context_length: int | None = None
    """Of prompt and output together."""
    max_total_tokens: int | None = None
    """Tokens in the KV pool."""
    max_running_requests: int | None = None
    """More requests wait in the queue."""
    vocab_size: int | None = None
    """Ids outside of it are refused."""

    def told(self) -> dict[str, int]:
        """What ``/server_info`` says of them; prompts must be shorter than its ``max_req_input_len``."""
        sizes = {"max_total_num_tokens": self.max_total_tokens, "max_running_requests": self.max_running_requests}
        if self.context_length is not None:
            sizes["max_req_input_len"] = _longest_prompt(self.context_length, self.max_total_tokens)
        return {name: size for name, size in sizes.items() if size is not None}

    def allowed_new_tokens(self, request: GenerateRequest) -> int:
        """How many tokens a request gets. Raises ``WireError`` if its prompt, or what it asks for, is too long.

        Prompt and output may fill the context, but are cut two tokens before its end, or that of the KV pool.
        """
        ids, wanted = request.input_ids, request.max_new_tokens
        if self.vocab_size is not None and (min(ids) < 0 or max(ids) >= self.vocab_size):
            raise bad_value(f"input_ids has an id outside of the vocabulary of {self.vocab_size}")
        context = self.context_length or self.max_total_tokens
        if context is None:
            return _WITHOUT_LIMITS if wanted is None else wanted
        length, longest = len(ids), _longest_prompt(context, self.max_total_tokens)
        if length >= context:
            raise bad_value(
                f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
            )
        if wanted is not None and length + wanted > context:
            raise bad_value(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {length + wanted} tokens: {length} tokens from the input messages and {wanted} "
                "tokens for the completion."
            )
        if length >= longest:
            raise bad_value(f"Input length ({length} tokens) exceeds the maximum allowed length ({longest} tokens).")
        if request.logprob_start_len > length:
            raise bad_value(
                f"logprob_start_len={request.logprob_start_len} is higher than the number of input tokens {length}."
            )
        room = min(context, self.max_total_tokens or context) - _UNUSED_TOKENS - length
        return room if wanted is None else min(wanted, room)


def _longest_prompt(context_length: int, kv_tokens: int | None) -> int:
    return min(context_length, kv_tokens or context_length) - 1 - _SPARE_TOKENS


def _input_ids(body: Mapping[str, Any]) -> Sequence[int]:
    ids: list[int] | None = field(body, "input_ids", list)
    if ids is None:
        raise bad_value("Either text, input_ids or input_embeds should be provided (this server takes input_ids).")
    if not ids:
        raise bad_value("input_ids cannot be empty.")
    kinds: set[Any] = {type(token) for token in ids}
    if bool in kinds:
        raise WireError(400, {"error": "input_ids: expected integers, got a boolean"})
    if kinds == {list}:
        raise bad_value("batches are not supported by this server: input_ids must be one list of integers")
    if kinds != {int}:
        raise bad_request("input_ids: expected integers")
    return ids


def _sampling_params(params: Mapping[str, Any]) -> dict[str, Any]:
    for key in params:
        if key not in _SAMPLING and key not in _NEUTRAL:
            known = ", ".join(sorted([*_SAMPLING, *_NEUTRAL]))
            raise WireError(400, {"error": f"unknown field `{key[:_SHOWN]}`, expected one of {known}"})
    for key, allowed in _NEUTRAL.items():
        if params.get(key) is not None and params[key] not in allowed:
            raise bad_value(f"{key} is {shown(params[key])}, which this server does not support")
    read: dict[str, Any] = {}
    for key, (kinds, default) in _SAMPLING.items():
        value = params.get(key, default)
        if value is not None and type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise WireError(400, {"error": f"sampling_params.{key}: expected {expected}, got {shown(value)}"})
        # For the number of tokens null has a meaning of its own: as many as fit.
        read[key] = default if value is None and key != "max_new_tokens" else value
    stop = read["stop"]
    _require_all(stop, str, "stop")
    _require_all(read["stop_token_ids"], int, "stop_token_ids")
    read["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    read["stop_token_ids"] = tuple(read["stop_token_ids"])
    _check_params(read)
    return read


def _require_all(values: Sequence[Any], kind: type, key: str) -> None:
    for value in values:
        if type(value) is not kind:
            raise WireError(400, {"error": f"sampling_params.{key}: expected {kind.__name__}, got {shown(value)}"})


def _check_params(params: Mapping[str, Any]) -> None:
    rules: Mapping[str, tuple[bool, str]] = {
        "max_new_tokens": ((params["max_new_tokens"] or 0) >= 0, "at least 0"),
        "temperature": (math.isfinite(params["temperature"]) and params["temperature"] >= 0, "finite, at least 0"),
        "top_p": (0 < params["top_p"] <= 1, "in (0, 1]"),
        "top_k": (params["top_k"] == -1 or params["top_k"] >= 1, "-1 (disable) or at least 1"),
        "min_p": (0 <= params["min_p"] <= 1, "in [0, 1]"),
        "stop": (
            all(params["stop"]) and len(params["stop"]) <= _MOST_STOPS,
            f"at most {_MOST_STOPS} strings that are not empty",
        ),
    }
    for key, (right, allowed) in rules.items():
        if not right:
            raise bad_value(f"{key} must be {allowed}, got {shown(params[key])}.")
