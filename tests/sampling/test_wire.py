"""The wire format: what is sent, which replies are refused, whose version a token is, how errors read."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import orjson
import pytest

from asyncrl.errors import ProtocolError
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.wire import error_text, generate_body, parse_segment
from asyncrl.servers.generation import Generation
from asyncrl.servers.wireserver import WireError, bad_value, parse_body, parse_generate
from asyncrl.types import StopReason, VersionSpan


def segment_request(**options: Any) -> SegmentRequest:
    """A request at version 5."""
    options = {"version": 5, "max_new_tokens": 4} | options
    return SegmentRequest(trajectory_id="t", input_ids=np.array([7, 8, 9], dtype=np.int32), **options)


def reply(**changes: Any) -> dict[str, Any]:
    """A right reply of three tokens, with changes in its ``meta_info``."""
    generation = Generation[None](
        wire=parse_generate({"rid": "r", "input_ids": [7, 8, 9], "return_logprob": True}),
        tokens=array("q", [7, 8, 9, 3, 4, 1]),
        logprobs=[-0.5, -1.5, -0.25],
        finish_reason={"type": "stop", "matched": 1},
        versions=[("5", 0)],
        cached_tokens=2,
    )
    body = generation.reply(label="5", decode=lambda ids: "abc")
    body["meta_info"].update(changes)
    return body


def spans(*parts: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    """(version, start, end) as spans."""
    return tuple(VersionSpan(version=version, start=start, end=end) for version, start, end in parts)


def reported(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    """(label, start, end) as a server reports them."""
    return [{"version": label, "start": start, "end": end} for label, start, end in parts]


def test_a_body_says_everything_that_matters() -> None:
    """A server's own defaults, such as its model's top-p or 128 tokens, never apply."""
    request = segment_request(
        temperature=0.7, stop=("x",), stop_token_ids=(1,), seed=11, adapter="run-v5", extra_key="k"
    )
    body = orjson.loads(orjson.dumps(generate_body(request, rid="r1"), option=orjson.OPT_SERIALIZE_NUMPY))
    assert body == {
        "rid": "r1",
        "input_ids": [7, 8, 9],
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "stop": ["x"],
            "stop_token_ids": [1],
            "ignore_eos": False,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "sampling_seed": 11,
        },
        "return_logprob": True,
        "stream": False,
        "lora_path": "run-v5",
        "extra_key": "k",
    }


def test_base_weights_name_no_adapter() -> None:
    """Neither is an empty cache key sent."""
    assert not {"lora_path", "extra_key"} & set(generate_body(segment_request(), rid="r"))


def test_what_the_client_sends_the_server_reads() -> None:
    """Both directions of the module agree."""
    request = segment_request(top_k=5, stop=("x", "y"), stop_token_ids=(1, 2), seed=11, adapter="a", extra_key="k")
    read = parse_generate(parse_body(orjson.dumps(generate_body(request, rid="r1"), option=orjson.OPT_SERIALIZE_NUMPY)))
    assert (read.rid, list(read.input_ids), read.lora_path, read.extra_key) == ("r1", [7, 8, 9], "a", "k")
    assert (read.max_new_tokens, read.temperature, read.top_p, read.top_k) == (4, 1.0, 1.0, 5)
    assert (read.stop, read.stop_token_ids, read.sampling_seed) == (("x", "y"), (1, 2), 11)
    assert (read.ignore_eos, read.no_stop_trim, read.skip_special_tokens) == (False, True, False)
    assert (read.return_logprob, read.logprob_start_len) == (True, -1)


def test_a_reply_is_a_segment() -> None:
    """Ids, log-probabilities, stop reason and reuse are as served."""
    segment = parse_segment(reply(), request=segment_request(), server="http://s")
    assert segment.tokens.tolist() == [3, 4, 1] and segment.tokens.dtype == np.int32
    assert segment.logprobs.tolist() == [-0.5, -1.5, -0.25]
    assert segment.versions == spans((5, 0, 3))
    assert (segment.stop, segment.cached_tokens, segment.server) == (StopReason.STOP, 2, "http://s")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"completion_tokens": 2}, "3 ids, 3 log-probabilities and completion_tokens 2"),
        ({"output_token_logprobs": [[-0.5, 3, None]]}, "3 ids, 1 log-prob"),
        ({"output_token_logprobs": None}, "3 ids, 0 log-prob"),
        ({"output_token_logprobs": [[-0.5, 3, None], [-1.5, 5, None], [-0.25, 1, None]]}, "not the ids"),
        ({"output_token_logprobs": [[-0.5, 3, None], [None, 4, None], [-0.25, 1, None]]}, "not a finite number"),
        ({"output_token_logprobs": [[-0.5, 3], [], [-0.25, 1]]}, "IndexError"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "were not numbers"),
        ({"finish_reason": None}, "finish_reason is None"),
        ({"finish_reason": {"type": "explosion"}}, "explosion"),
        ({"weight_versions": reported(("default", 0, 3))}, "'default'"),
        ({"weight_versions": reported(("5", 0, 2))}, "do not cover 3 tokens"),
        ({"weight_versions": reported(("5", 0, 1), ("6", 2, 4))}, "leave a gap at 1"),
        ({"weight_versions": [{"version": "5"}]}, "KeyError"),
        ({"weight_versions": None, "weight_version": None}, "weights None"),
    ],
)
def test_a_reply_that_must_not_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    """Nothing is padded, cut or guessed."""
    with pytest.raises(ProtocolError, match=message):
        parse_segment(reply(**changes), request=segment_request())


def test_infinite_logprobs_are_refused() -> None:
    """JSON has no infinity, but a lenient parser gives one."""
    entries = [[-0.5, 3, None], [float("-inf"), 4, None], [-0.25, 1, None]]
    with pytest.raises(ProtocolError, match="finite"):
        parse_segment(reply(output_token_logprobs=entries), request=segment_request())


@pytest.mark.parametrize("body", [{}, {"output_ids": [1]}, [reply()], {"meta_info": None, "output_ids": []}])
def test_a_reply_of_another_shape_is_refused(body: Any) -> None:
    """The message shows what came instead."""
    with pytest.raises(ProtocolError, match="not one of a generation"):
        parse_segment(body, request=segment_request())


def test_an_abort_in_the_queue_is_an_empty_segment() -> None:
    """That reply has no prompt_tokens, cached_tokens or log-probabilities."""
    meta = {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "5"}
    segment = parse_segment({"text": "", "output_ids": [], "meta_info": meta}, request=segment_request())
    assert len(segment.tokens) == 0
    assert (segment.versions, segment.stop) == ((), StopReason.ABORT)


def test_an_adapter_is_the_version_of_all_tokens() -> None:
    """The label is about the base weights, whatever it is."""
    body = reply(weight_versions=reported(("default", 0, 3)))
    assert parse_segment(body, request=segment_request(adapter="run-v5")).versions == spans((5, 0, 3))


@pytest.mark.parametrize(
    ("parts", "in_place", "expected"),
    [
        ([("4", 0, 3)], False, [(4, 0, 3)]),
        ([("6", 0, 3)], False, [(6, 0, 3)]),
        ([("6", 0, 3)], True, [(5, 0, 1), (6, 1, 3)]),
        ([("4", 0, 3)], True, [(4, 0, 3)]),
        ([("5", 0, 1), ("6", 1, 3)], False, [(5, 0, 1), (6, 1, 3)]),
        ([("5", 0, 1), ("6", 1, 3)], True, [(5, 0, 2), (6, 2, 3)]),
        ([("5", 0, 1), ("6", 1, 2), ("7", 2, 3)], True, [(5, 0, 2), (6, 2, 3)]),
    ],
)
def test_spans_are_those_that_the_server_reports(
    parts: list[tuple[str, int, int]], in_place: bool, expected: list[tuple[int, int, int]]
) -> None:
    """With updates in place the first token after a switch counts as the older version's."""
    body = reply(weight_versions=reported(*parts))
    assert parse_segment(body, request=segment_request(), in_place=in_place).versions == spans(*expected)


@pytest.mark.parametrize(("label", "version"), [("4", 4), ("5", 5), ("6", 5)])
def test_without_spans_the_older_of_stamp_and_last_label_counts(label: str, version: int) -> None:
    """The last label alone may be newer than the tokens: it is read when they are done."""
    body = reply(weight_versions=None, weight_version=label)
    assert parse_segment(body, request=segment_request()).versions == spans((version, 0, 3))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"error":"unknown field `max_tokens`"}', "unknown field `max_tokens`"),
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"object":"error","message":"The request queue is full.","code":503}', "The request queue is full."),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"success":false,"message":"Failed"}', "Failed"),
        (b'{"rid":null,"success":false,"error_message":"is already loaded","loaded_adapters":{}}', "is already loaded"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"[1]", "[1]"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_the_text_of_an_error_is_found_in_every_shape(content: bytes, text: str) -> None:
    """SGLang has several, by the layer that refuses."""
    assert error_text(400, content) == f"status 400: {text}"


def test_unknown_sampling_keys_are_refused_and_other_keys_ignored() -> None:
    """The error is a string for the one; the other is as in SGLang."""
    with pytest.raises(WireError, match=r"unknown field `max_tokens`, expected one of .*max_new_tokens") as caught:
        parse_generate({"input_ids": [1], "sampling_params": {"max_tokens": 5}})
    assert caught.value.status == 400 and isinstance(caught.value.body["error"], str)
    assert parse_generate({"input_ids": [1], "whatever": 2}).max_new_tokens == 128


def test_null_is_the_default() -> None:
    """Of every key."""
    content = (
        b'{"input_ids":[1],"rid":null,"extra_key":null,"sampling_params":{"temperature":null,"stop":null,"top_k":null}}'
    )
    read = parse_generate(parse_body(content))
    assert (read.temperature, read.stop, read.top_k, read.extra_key) == (1.0, (), -1, "")
    assert read.rid


@pytest.mark.parametrize(
    ("sampling", "key"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"n": 2}, "n is 2"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ],
)
def test_bad_sampling_parameters_are_named(sampling: dict[str, Any], key: str) -> None:
    """A value that would sample something else is never ignored."""
    with pytest.raises(WireError, match=key):
        parse_generate({"input_ids": [1], "sampling_params": sampling})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be an object"),
        (b"{}", "Either text, input_ids or input_embeds should be provided"),
        (b'{"input_ids":[]}', "cannot be empty"),
        (b'{"input_ids":[1.0]}', "integers"),
        (b'{"input_ids":[[1],[2]]}', "batches"),
        (b'{"input_ids":[1],"stream":true}', "stream"),
        (b'{"input_ids":[1],"rid":7}', "rid"),
        (b'{"input_ids":[1],"logprob_start_len":"0"}', "logprob_start_len"),
        (b'{"input_ids":[1],"sampling_params":[]}', "sampling_params"),
    ],
)
def test_bodies_that_cannot_be_served_are_refused(content: bytes, message: str) -> None:
    """With status 400 and the reason."""
    with pytest.raises(WireError, match=message) as caught:
        parse_generate(parse_body(content))
    assert caught.value.status == 400


def test_a_reply_without_output_has_one_empty_span() -> None:
    """As SGLang reports it."""
    generation = Generation[None](
        wire=parse_generate({"input_ids": [7, 8], "return_logprob": True, "logprob_start_len": 0}),
        tokens=array("q", [7, 8]),
        prompt_logprobs=[(None, 7), (-0.5, 8)],
        finish_reason={"type": "length", "length": 0},
    )
    body = generation.reply(label="3", decode=lambda ids: "")
    assert body["meta_info"]["weight_versions"] == reported(("3", 0, 0))
    assert body["meta_info"]["input_token_logprobs"] == [[None, 7, None], [-0.5, 8, None]]


def test_refusals_of_values_have_the_nested_shape() -> None:
    """And their text can be read back."""
    error = bad_value("too long")
    assert (error.status, error.body) == (400, {"error": {"message": "too long"}})
    assert str(error) == "status 400: too long"
