"""Replies with status 200 that are wrong in every way: what comes out is sound, or a named error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, ProtocolError, SamplingError
from asyncrl.sampling.control import ServerControl, ask
from asyncrl.sampling.labels import Labels, Writer
from asyncrl.sampling.replies import adapter_names, context_of, integer, parse_load, ranks_of, scored, shown
from asyncrl.sampling.wire import error_text, parse_segment
from asyncrl.testing.clock import run_virtual
from asyncrl.testing.server import Fault
from asyncrl.types import Segment
from tests.sampling.clients import CONTROL_CALLS, URL, make_request, open_client, scripted

VOCABULARY, LIMIT = 64, 4
_LONG_MESSAGE = 1500


def _reply() -> dict[str, Any]:
    ids, values = [3, 63, 0], [-0.5, 0.0, -7]
    return {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 0},
            "completion_tokens": 3,
            "cached_tokens": 2,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": 3}],
            "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=True)],
        },
    }


def _deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-5, 64, 99_999_999, 4.0, 5.0, -1e308, 1e308, 2.0**53, "abc", "7" * 5000, "\ud800", "٣", ""]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=5),
    st.builds(_deep, st.integers(1, 1000)),
    st.lists(st.integers(-5, 70), max_size=6),
    st.dictionaries(st.sampled_from(["type", "start", "version", "message", "x"]), st.integers(), max_size=3),
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*at, key))
    return found


def _changed(body: Any, draw: Callable[[Any], Any]) -> Any:
    """``body`` with one to three places that have another value, are gone, or are there twice."""
    changed = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(_places(changed) or [()]))
        if not place:
            return draw(_ODD)
        holder = changed
        for key in place[:-1]:
            holder = holder[key]
        match draw(st.sampled_from(["set", "set", "set", "delete", "double"])):
            case "set":
                holder[place[-1]] = draw(_ODD)
            case "delete":
                del holder[place[-1]]
            case "double" if isinstance(holder, list):
                holder.insert(place[-1], holder[place[-1]])
    return changed


def _require_sound(segment: Segment) -> None:
    """Every invariant that a trained segment has."""
    assert len(segment.tokens) == len(segment.logprobs) <= LIMIT
    assert segment.tokens.dtype == np.int32 and segment.logprobs.dtype == np.float32
    assert all(0 <= token < VOCABULARY for token in segment.tokens.tolist())
    assert np.isfinite(segment.logprobs).all() and (segment.logprobs <= 1e-3).all()
    assert type(segment.cached_tokens) is int and segment.cached_tokens >= 0
    assert sum(span.end - span.start for span in segment.versions) == len(segment.tokens)
    assert all(type(number) is int for span in segment.versions for number in (span.version, span.start, span.end))


@pytest.mark.slow
@settings(max_examples=250, derandomize=True, deadline=None)
@given(st.data(), st.booleans())
def test_a_reply_that_was_changed_anywhere_is_a_sound_segment_or_a_short_named_error(
    data: st.DataObject, in_place: bool
) -> None:
    """Nothing that breaks an invariant is believed, whatever it is and wherever it stands."""
    body = _changed(_reply(), data.draw)
    try:
        segment = parse_segment(body, request=make_request("t"), in_place=in_place, vocab_size=VOCABULARY)
    except SamplingError as error:
        assert len(str(error)) < _LONG_MESSAGE
    else:
        _require_sound(segment)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (("output_ids", 1), -5, "ids have -5, which is outside of a vocabulary of 64"),
        (("output_ids", 1), 64, "ids have 64, which is outside"),
        (("output_ids", 1), 99_999_999, "ids have 99999999, which is outside"),
        (("output_ids", 1), 2**63, "ids have 9223372036854775808, which is outside"),
        (("output_ids",), "abc", "ids are 'abc'"),
        (("output_ids",), [3] * 50, "50 ids"),
        (("meta_info", "output_token_logprobs", 0, 0), 5.0, "log-probability of 5.0"),
        (("meta_info", "output_token_logprobs", 0, 0), 0.01, "log-probability of 0.01"),
        (("meta_info", "output_token_logprobs", 0, 0), -1e308, "log-probability of -1e.308"),
        (("meta_info", "output_token_logprobs", 0, 0), float("nan"), "log-probability of nan"),
        (("meta_info", "weight_versions", 0, "end"), 3.0, "'end': 3.0"),
        (("meta_info", "weight_versions", 0, "start"), False, "'start': False"),
        (("meta_info", "completion_tokens"), 3.0, "completion_tokens 3.0"),
        (("meta_info", "cached_tokens"), -7, "cached_tokens is -7"),
        (("meta_info", "cached_tokens"), "abc", "cached_tokens is 'abc'"),
        (("meta_info", "cached_tokens"), True, "cached_tokens is True"),
        (("meta_info", "finish_reason"), {"type": ["stop"]}, "finish_reason is"),
        (("meta_info",), _deep(900), "not one of a generation"),
    ],
)
def test_the_error_has_the_field_and_its_value(at: tuple[Any, ...], value: Any, message: str) -> None:
    """Whoever reads the log sees what the server sent, cut to a sane length."""
    body = _reply()
    holder = body
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    with pytest.raises(ProtocolError, match=message):
        parse_segment(body, request=make_request("t"), vocab_size=VOCABULARY)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 50])
@pytest.mark.parametrize("most", [None, 1, 4])
def test_no_more_tokens_come_out_than_were_asked_for(count: int, most: int | None) -> None:
    """Neither than the request's, nor than the server had room for."""
    body = _reply()
    body["output_ids"] = [5] * count
    entries = [[-1.0, 5, None]] * count
    spans = [{"version": "0", "start": 0, "end": count}]
    body["meta_info"] |= {"output_token_logprobs": entries, "completion_tokens": count, "weight_versions": spans}
    allowed = LIMIT if most is None else most
    if count <= allowed:
        segment = parse_segment(body, request=make_request("t"), most_tokens=most)
        assert len(segment.tokens) == count
    else:
        with pytest.raises(ProtocolError, match=f"{count} ids, but {allowed} were asked for"):
            parse_segment(body, request=make_request("t"), most_tokens=most)


def _claimed() -> Labels:
    """Of a run that has given its servers three versions."""
    labels = Labels()
    labels.claim(Writer())
    labels.give(3)
    return labels


_ODD_LABELS: list[Any] = [None, True, 7, 7.0, "", "-1", "1e3", "9" * 23, "7" * 5000, "٣", "\ud800", 10**5000]


@pytest.mark.parametrize("labels", [Labels(), _claimed()])
@pytest.mark.parametrize("adapter", [None, "a"])
@pytest.mark.parametrize(
    "label", [*_ODD_LABELS, [], {}, _deep(500), _deep(990)], ids=lambda label: type(label).__name__
)
def test_a_label_of_any_kind_is_a_version_or_refused(label: Any, adapter: str | None, labels: Labels) -> None:
    """Whether it stands beside spans or alone, and whoever wrote it."""
    for meta in ({"weight_versions": [{"version": label, "start": 0, "end": 3}]}, {"weight_version": label}):
        body = _reply()
        if "weight_version" in meta:
            del body["meta_info"]["weight_versions"]
        body["meta_info"] |= meta
        try:
            segment = parse_segment(body, request=make_request("t", adapter=adapter), labels=labels)
        except SamplingError as error:
            assert len(str(error)) < _LONG_MESSAGE
        else:
            _require_sound(segment)


_CONTROL: dict[str, tuple[dict[str, Any], Callable[[Any], object]]] = {
    "load": (
        {
            "loads": [
                {
                    "dp_rank": 0,
                    "num_running_reqs": 3,
                    "num_waiting_reqs": 1,
                    "token_usage": 0.5,
                    "max_running_requests": 8,
                    "gen_throughput": 12.5,
                }
            ]
        },
        parse_load,
    ),
    "adapters": ({"data": [{"id": "base", "parent": None}, {"id": "a", "parent": "base"}]}, adapter_names),
    "context": ({"context_length": 2048, "max_total_num_tokens": 16384, "max_req_input_len": 2042}, context_of),
    "ranks": ({"tp_size": 2}, ranks_of),
    "scores": (
        {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-1, 3, None]]}},
        lambda body: scored(body, [2, 3]),
    ),
}


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.sampled_from(sorted(_CONTROL)), st.data())
def test_a_control_reply_that_was_changed_anywhere_is_read_or_refused_by_name(name: str, data: st.DataObject) -> None:
    """Counts are counts, names are texts and scores are log-probabilities, or a short error says which is not."""
    body, read = _CONTROL[name]
    changed = _changed(body, data.draw)
    if not isinstance(changed, Mapping) and name != "scores":
        return  # that it is an object was seen before
    try:
        found = read(changed)
    except ProtocolError as error:
        assert len(str(error)) < _LONG_MESSAGE
        return
    match name:
        case "load":
            assert all(type(count) is int and count >= 0 for count in (found.running, found.waiting))  # type: ignore[attr-defined]
        case "adapters":
            assert all(isinstance(adapter, str) for adapter in found)  # type: ignore[attr-defined]
        case "context" | "ranks":
            assert found is None or (type(found) is int and found >= 1)
        case "scores":
            assert np.isfinite(found).all() and len(found) == 2  # type: ignore[call-overload,arg-type]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(_ODD | st.builds(lambda digits: 10**digits, st.integers(0, 6000)))
def test_any_value_is_shown_in_a_few_words(value: object) -> None:
    """A message never costs more than a line, and never fails itself."""
    assert len(shown(value)) <= 300


@pytest.mark.parametrize("value", [0, 3, 2**53])
def test_counts_are_read(value: int) -> None:
    """Any count that a float can hold."""
    assert integer(value, "x") == value


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    st.integers(400, 599),
    st.one_of(
        st.binary(max_size=50),
        st.sampled_from(
            [b'{"error":{"message":' + b"[" * 900 + b"]" * 900 + b"}}", b'{"message":"' + b"x" * 9000 + b'"}']
        ),
    ),
)
def test_the_text_of_an_error_is_short(status: int, content: bytes) -> None:
    """Whatever the body of an error is."""
    assert error_text(status, content).startswith(f"status {status}: ")
    assert len(error_text(status, content * 1000)) < _LONG_MESSAGE


_CALLS: dict[str, Callable[[ServerControl], Any]] = {
    "/model_info": lambda server: server.weight_label(),
    "/server_info": lambda server: server.tensor_ranks(),
    "/v1/loads": lambda server: server.load(),
    "/v1/models": lambda server: server.adapters(),
    "/weights_checker": lambda server: server.checksum(),
    "/generate": lambda server: server.score(np.array([1, 2, 3]), start=1, adapter=None, extra_key=""),
}
_NOT_TRUE = [b"false", b"null", b"0", b"1", b'"true"', b"[]"]
_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe",
    b'"x"',
    b"1e999",
    b"[" * 5000,
    b"{}",
    b'{"loads":[{}]}',
    b"x" * 10**6,
]


@pytest.mark.parametrize("route", sorted(_CALLS))
def test_a_body_that_is_no_answer_is_a_sampling_error_of_its_server(route: str) -> None:
    """No JSON, cut JSON, JSON of another shape and very much of it, with status 200."""

    async def main() -> None:
        one = scripted()
        async with open_client({URL: one}) as sampler:
            for body in _BODIES:
                one.fault(route, Fault(status=200, body=body))
                try:
                    await _CALLS[route](sampler.live[0])
                except SamplingError as error:
                    assert str(error).startswith(URL) and len(str(error)) < _LONG_MESSAGE
                else:
                    assert body.endswith(b"}") and route in ("/model_info", "/server_info", "/v1/models")

    run_virtual(main)


_NO_SUCCESS = [b"", b"<html>", b"[]", b"null", b"1", *(b'{"success":' + value + b"}" for value in _NOT_TRUE)]


@pytest.mark.virtual_clock
@pytest.mark.parametrize("name", sorted(set(CONTROL_CALLS) - {"flush"}))
async def test_a_control_call_that_does_not_say_so_did_not_succeed(name: str, threads_in_place: None) -> None:
    """Status 200 from whatever stands in between is no success, nor is anything else than true."""
    route, call = CONTROL_CALLS[name]
    one = scripted()
    async with open_client({URL: one}) as sampler:
        for body in _NO_SUCCESS:
            one.fault(route, *[Fault(status=200, body=body)] * 2)
            with pytest.raises(SamplingError, match=URL):
                await call(sampler.live[0])
            one.fault(route)


@pytest.mark.parametrize("body", _BODIES)
def test_a_sampling_reply_that_is_no_answer_is_a_protocol_error(body: bytes) -> None:
    """And the server is looked at before its next request."""

    async def main() -> None:
        one = scripted()
        async with open_client({URL: one}) as sampler:
            one.fault("/generate", Fault(status=200, body=body))
            with pytest.raises(ProtocolError, match=URL):
                await sampler.sample(make_request("t"))
            await sampler.sample(make_request("t"))

    run_virtual(main)


_NO_CONTEXTS: tuple[Any, ...] = (-1, 0, 6, "2048", 2.0, True, [])


@pytest.mark.parametrize(
    "info",
    [
        *({"version": "scripted", "context_length": size} for size in _NO_CONTEXTS),
        *({"version": version} for version in (None, 7, "0.0.1", ["scripted"], "x" * 5000)),
    ],
)
def test_a_server_that_says_odd_things_about_itself_is_not_taken(info: dict[str, Any]) -> None:
    """Its version and its context are checked before it gets a request."""

    async def main() -> None:
        one = scripted()
        one.fault("/server_info", Fault(status=200, body=orjson.dumps(info)))
        with pytest.raises(ConfigError, match=URL):
            async with open_client({URL: one}):
                pass

    run_virtual(main)


def test_a_server_is_asked_for_what_it_is() -> None:
    """A right answer is read."""

    async def main() -> None:
        one = scripted()
        async with open_client({URL: one}) as sampler:
            one.limits["context_length"] = 2048
            assert (await ask(sampler.live[0], allow_version=False)).context_tokens == 2042

    run_virtual(main)
