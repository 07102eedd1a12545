"""How requests end by themselves."""

from __future__ import annotations

import pytest

from tests.conformance.subject import CONTEXT, Subject, body, outputs


@pytest.mark.slow
async def test_an_end_of_sequence_token_ends_a_request(subject: Subject) -> None:
    """It is in the ids and their log-probabilities."""
    reply = await subject.generate(new=1000, sampling={"ignore_eos": False})
    outputs(reply)
    matched = reply["meta_info"]["finish_reason"]["matched"]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    assert reply["output_ids"].index(matched) == len(reply["output_ids"]) - 1


@pytest.mark.parametrize("kept", [True, False])
async def test_a_stop_token_is_in_the_ids_and_can_be_cut_from_the_text(subject: Subject, kept: bool) -> None:
    """``no_stop_trim`` is about the text alone."""
    stops = list(range(2, subject.served.vocabulary))
    sampling = {"ignore_eos": False, "stop_token_ids": stops, "no_stop_trim": kept, "skip_special_tokens": False}
    reply = await subject.generate(new=50, sampling=sampling)
    outputs(reply)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": reply["output_ids"][-1]}
    assert not set(reply["output_ids"][:-1]) & set(stops)
    if reply["output_ids"] == reply["output_ids"][-1:]:
        assert len(reply["text"]) == (1 if kept else 0)


async def test_ignore_eos_ignores_stop_tokens_too(subject: Subject) -> None:
    """As its name does not say."""
    stops = list(range(2, subject.served.vocabulary))
    reply = await subject.generate(new=20, sampling={"ignore_eos": True, "stop_token_ids": stops})
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


@pytest.mark.parametrize("kept", [True, False])
async def test_a_stop_string_ends_at_the_token_that_completes_it(subject: Subject, kept: bool) -> None:
    """Also with ``ignore_eos``; it can be kept in the text, and is always in the ids."""
    free = await subject.generate(new=12, sampling={"temperature": 0})
    stop = free["text"][3:5]
    end = free["text"].index(stop) + len(stop)
    sampling = {"temperature": 0, "stop": [stop, "\x00"], "no_stop_trim": kept}
    reply = await subject.generate(new=12, sampling=sampling)
    outputs(reply)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == free["output_ids"][:end]
    assert reply["text"] == free["text"][: end if kept else end - len(stop)]


async def test_an_empty_stop_string_stops_at_once(subject: Subject) -> None:
    """Every text contains it."""
    if await subject.differs():
        return
    reply = await subject.generate(sampling={"stop": [""]})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}
    assert len(reply["output_ids"]) == 1


async def test_no_new_tokens_is_a_request_that_only_scores(subject: Subject) -> None:
    """It has one empty span."""
    reply = await subject.generate(new=0)
    assert outputs(reply) == []
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert reply["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


async def test_without_a_length_a_request_gets_128_tokens(subject: Subject) -> None:
    """Which is why we always send one."""
    content = body() | {"sampling_params": {"ignore_eos": True}}
    reply = await subject.post("/generate", content)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 128}


@pytest.mark.parametrize("wanted", [18, None])
async def test_the_context_is_full_two_tokens_before_its_end(subject: Subject, wanted: int | None) -> None:
    """What was asked for is cut in silence; null asks for all that fits."""
    prompt = [5] * (CONTEXT - 18)
    reply = await subject.generate(prompt, sampling={"max_new_tokens": wanted})
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    assert len(outputs(reply)) == 16
