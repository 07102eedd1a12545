"""Labels of weights: only what this process has given to servers is believed, and whoever else writes is named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsOverwritten
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.labels import ForeignWeights, Labels, Writer, WrongWeights
from asyncrl.sampling.wire import parse_segment

US = Writer(run="0123abcd", process="89abcdef")
URL = "http://one"
IDS = st.text("0123456789abcdef", min_size=8, max_size=8)
MANY = settings(max_examples=150, derandomize=True, deadline=None)


def _at(version: int, writer: Writer = US) -> Labels:
    labels = Labels()
    labels.claim(writer)
    for given_version in range(max(0, version - 3), version + 1):
        labels.give(given_version)
    return labels


def _request(version: int, *, adapter: str | None = None) -> SegmentRequest:
    ids = np.arange(3, dtype=np.int32)
    return SegmentRequest(trajectory_id="t", input_ids=ids, max_new_tokens=8, version=version, adapter=adapter)


def _reply(*parts: tuple[Any, int, int], alone: bool = False) -> dict[str, Any]:
    tokens = parts[-1][2]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": tokens},
        "completion_tokens": tokens,
        "weight_version": parts[-1][0],
        "output_token_logprobs": [[-1.0, 5, None]] * tokens,
    }
    if not alone:
        meta["weight_versions"] = [{"version": label, "start": start, "end": end} for label, start, end in parts]
    return {"output_ids": [5] * tokens, "meta_info": meta}


@MANY
@given(run=IDS, process=IDS, newest=st.integers(0, 10**6), version=st.integers(0, 10**6))
def test_own_versions_are_read_back_and_no_later_ones(run: str, process: str, newest: int, version: int) -> None:
    """What was given is believed, up to the newest that was."""
    writer = Writer(run=run, process=process)
    labels = _at(newest, writer)
    if version <= newest:
        assert labels.version(writer.label(version)) == version
    else:
        message = f"weights of version {version}, which was not made yet; this run is {run} at {newest}"
        with pytest.raises(WrongWeights, match=re.escape(message)):
            labels.version(writer.label(version))


LABELS = st.one_of(
    st.builds(lambda run, process, n: f"{run}.{process}:{n}", IDS, IDS, st.integers(-5, 10**6)),
    st.integers(-5, 10**20).map(str),
    st.text(max_size=12),
    st.text("0123456789", max_size=6).map(lambda number: f"{US.run}.{US.process}:{number}٣"),
    st.sampled_from(["default", "", "None", US.label(7) + "0" * 5000, " " + US.label(7), US.label(7).upper()]),
    st.none() | st.integers() | st.floats() | st.booleans() | st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@MANY
@given(label=LABELS, place=st.integers(0, 2), alone=st.booleans())
def test_no_other_label_is_believed_wherever_it_stands(label: Any, place: int, alone: bool) -> None:
    """As the only one, or of some of the tokens; the refusal names this run."""
    ours = [US.label(version) for version in range(8)]
    assume(label not in ours)
    spans: list[Any] = [US.label(7)] * 3
    spans[place] = label
    parts = [(label, 0, 3)] if alone else [(span, start, start + 1) for start, span in enumerate(spans)]
    with pytest.raises(WrongWeights, match=f"this run is {US.run} at 7"):
        parse_segment(_reply(*parts, alone=alone), request=_request(7), labels=_at(7))


def test_another_writer_is_named_with_its_version() -> None:
    """Another run, another process of this run, or a name that nobody of ours gives."""
    labels = _at(7)
    labels.found("mine")
    for label, error, message in [
        ("fedcba98.00000000:50", ForeignWeights, "weights of run fedcba98, version 50; this run is 0123abcd at 7"),
        ("0123abcd.00000000:8", ForeignWeights, "weights of version 8 by another process of this run"),
        ("50", ForeignWeights, "weights '50', which somebody else has named"),
        ("default", WrongWeights, "weights 'default', which are no version of ours"),
        ("mine", WrongWeights, "weights 'mine', which are no version of ours"),
    ]:
        with pytest.raises(error, match=re.escape(message)) as caught:
            labels.version(label)
        assert type(caught.value) is error


@pytest.mark.parametrize("label", ["default", "fedcba98.00000000:50", US.label(7)])
def test_the_weights_below_an_adapter_stay_what_they_were(label: str) -> None:
    """Whatever their label was when the adapter was checked; another one, also for part of the tokens, is refused."""
    labels = Labels()
    labels.claim(US)
    labels.hold(URL, label)
    request = _request(3, adapter="a-v3")
    (span,) = parse_segment(_reply((label, 0, 3)), request=request, labels=labels).versions
    assert (span.version, span.start, span.end) == (3, 0, 3)
    for parts in ([("other", 0, 3)], [(label, 0, 2), ("fedcba98.11111111:1", 2, 3)]):
        with pytest.raises(WrongWeights, match="its adapter is on weights"):
            parse_segment(_reply(*parts), request=request, labels=labels)


def test_without_a_writer_labels_are_plain_numbers() -> None:
    """As from a publisher of somebody's own."""
    labels = Labels()
    assert labels.version("12") == 12
    assert labels.give(3) == "3"
    for label in ("-1", "default", "٣", "1" * 19, None, 7, US.label(7)):
        with pytest.raises(WrongWeights, match="no version of ours"):
            labels.version(label)


def test_the_third_takeover_of_a_server_ends_the_run() -> None:
    """Many replies of one takeover count once, and so do those of requests that left before ours were there again."""
    labels = _at(7)
    other = ForeignWeights("weights of run fedcba98, version 50")
    for _ in range(2):
        since = labels.holds(URL)
        for _ in range(9):
            labels.report(URL, other, since=since)
        labels.hold(URL, US.label(7))
        labels.report(URL, other, since=since)
        labels.report(URL, WrongWeights("weights 'default'"), since=labels.holds(URL))
        labels.require_ours()
    with pytest.raises(WeightsOverwritten, match="http://one: weights of run fedcba98, version 50; found 3 times"):
        labels.report(URL, other, since=labels.holds(URL))
    with pytest.raises(WeightsOverwritten, match="fedcba98"):
        labels.require_ours()
    labels.claim(Writer())
    labels.require_ours()
