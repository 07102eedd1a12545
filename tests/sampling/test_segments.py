"""Replies to segments, at the edges: values of the wrong kind, version spans, and nothing of our own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ProtocolError
from asyncrl.sampling.wire import generate_body, parse_segment
from asyncrl.types import StopReason
from tests.sampling.clients import make_request


def _reply(ids: list[Any], logprobs: list[Any] | None = None, **meta: Any) -> dict[str, Any]:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    entries = [[value, token, None] for value, token in zip(values, ids, strict=True)]
    base = {
        "finish_reason": {"type": "length", "length": len(ids)},
        "completion_tokens": len(ids),
        "output_token_logprobs": entries,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return {"output_ids": ids, "meta_info": base | meta}


def test_nothing_is_added_at_the_end() -> None:
    """A segment that was cut by its length has no end-of-sequence that nobody sampled."""
    segment = parse_segment(_reply([3, 4]), request=make_request("t", stop_token_ids=(1,)))
    assert segment.tokens.tolist() == [3, 4]
    assert len(segment.logprobs) == 2
    assert segment.stop is StopReason.LENGTH


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_temperature_is_sent_and_log_probabilities_stay_as_served(temperature: float) -> None:
    """They are those of the tempered distribution already; dividing them would be wrong."""
    request = make_request("t", temperature=temperature)
    assert generate_body(request, rid="r")["sampling_params"]["temperature"] == temperature
    logprobs = [-1.2345678, -0.1]
    segment = parse_segment(_reply([3, 4], logprobs), request=request)
    assert np.array_equal(segment.logprobs, np.array(logprobs, dtype=np.float32))


@pytest.mark.parametrize("value", ["-0.5", True, None, [], float("nan"), float("inf"), 10**400])
def test_a_log_probability_of_another_kind_is_refused(value: Any) -> None:
    """Not even what numpy could read as a number."""
    with pytest.raises(ProtocolError, match="not a finite number"):
        parse_segment(_reply([3, 4], [-0.5, value]), request=make_request("t"))


@pytest.mark.parametrize("token", [4.0, True, "4", 2**40])
def test_an_id_of_another_kind_is_refused(token: Any) -> None:
    """A float that is equal to an id, and a number that is none of a vocabulary, are no ids."""
    with pytest.raises(ProtocolError, match="the reply's ids"):
        parse_segment(_reply([3, token]), request=make_request("t"))


def test_a_body_may_ask_for_less_than_the_request() -> None:
    """Where the server has no room for more."""
    params = generate_body(make_request("t", max_new_tokens=9), rid="r", max_new_tokens=2)["sampling_params"]
    assert params["max_new_tokens"] == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=6), st.booleans())
def test_spans_are_those_of_the_tokens_one_by_one(parts: list[tuple[int, int]], in_place: bool) -> None:
    """Merging and shifting whole spans gives what labelling each token gives."""
    labels = [version for version, length in parts for _ in range(length)]
    if not labels:
        return
    reported, start = [], 0
    for version, length in parts:
        reported.append({"version": str(version), "start": start, "end": start + length})
        start += length
    stamp = 1
    expected = [min(before, label) for before, label in pairwise([stamp, *labels])] if in_place else labels
    reply = _reply([5] * len(labels), weight_versions=reported)
    request = make_request("t", version=stamp, max_new_tokens=len(labels))
    segment = parse_segment(reply, request=request, in_place=in_place)
    found = [span.version for span in segment.versions for _ in range(span.start, span.end)]
    assert found == expected
    assert all(a.version != b.version for a, b in pairwise(segment.versions))
