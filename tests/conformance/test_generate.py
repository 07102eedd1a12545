"""Requests for tokens: what comes back, and what its log-probabilities mean."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from tests.conformance.subject import Subject, outputs
from tests.tinymodels import CLOSE

PROMPT = [5, 9, 17, 33, 8, 40, 12]


async def test_ids_go_in_and_ids_come_out(subject: Subject) -> None:
    """All that a client reads is there, and agrees with itself."""
    reply = await subject.generate(PROMPT, rid="r-1", new=8)
    meta = reply["meta_info"]
    assert len(outputs(reply)) == 8
    assert meta["id"] == "r-1"
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["num_retractions"]) == (len(PROMPT), 0, 0)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
    assert meta["input_token_logprobs"] == []
    assert all(0 <= token < subject.served.vocabulary for token in reply["output_ids"])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_logprobs_are_those_of_the_temperature(subject: Subject, temperature: float) -> None:
    """Logits are divided by it before the softmax."""
    reply = await subject.generate(PROMPT, new=12, sampling={"temperature": temperature})
    expected = subject.logprobs([*PROMPT, *reply["output_ids"]], len(PROMPT), temperature=temperature)
    np.testing.assert_allclose(outputs(reply), expected, atol=CLOSE)


@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"temperature": 0.6, "top_k": 1}])
async def test_greedy_sampling_takes_the_likeliest_token(subject: Subject, greedy: dict[str, float]) -> None:
    """Temperature 0 has the log-probabilities of temperature 1."""
    reply = await subject.generate(PROMPT, new=6, sampling=greedy)
    ids = [*PROMPT, *reply["output_ids"]]
    weights = subject.served.weights[0]
    likeliest = [int(subject.served.logits(weights, ids[:end], None)[-1].argmax()) for end in range(7, 13)]
    assert reply["output_ids"] == likeliest
    if greedy["temperature"] == 0:
        np.testing.assert_allclose(outputs(reply), subject.logprobs(ids, len(PROMPT)), atol=CLOSE)


async def test_logprobs_are_taken_before_top_p(subject: Subject) -> None:
    """So that they are not those of what was sampled."""
    reply = await subject.generate(PROMPT, new=12, sampling={"top_p": 0.3})
    expected = subject.logprobs([*PROMPT, *reply["output_ids"]], len(PROMPT))
    np.testing.assert_allclose(outputs(reply), expected, atol=CLOSE)


@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("start", [0, 3])
async def test_prompts_are_scored_at_temperature_one(subject: Subject, start: int, new: int) -> None:
    """Whatever the request's temperature is; the first position that is asked for never has a value."""
    reply = await subject.generate(PROMPT, new=new, sampling={"temperature": 1.7}, logprob_start_len=start)
    triples = reply["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in triples] == PROMPT[start:]
    assert triples[0][0] is None
    scores = [triple[0] for triple in triples[1:]]
    np.testing.assert_allclose(scores, subject.logprobs(PROMPT, start + 1), atol=CLOSE)
    assert len(outputs(reply)) == new


async def test_a_prompt_can_be_scored_from_its_end_and_not_further(subject: Subject) -> None:
    """Its length is nothing; more is refused."""
    reply = await subject.generate(PROMPT, logprob_start_len=len(PROMPT))
    assert reply["meta_info"]["input_token_logprobs"] == []
    refusal = await subject.generate(PROMPT, logprob_start_len=len(PROMPT) + 1, status=400)
    assert "logprob_start_len" in refusal["error"]["message"]


async def test_logprobs_come_only_if_they_are_asked_for(subject: Subject) -> None:
    """The keys are missing then."""
    reply = await subject.generate(return_logprob=False)
    assert len(reply["output_ids"]) == 4
    assert not {"output_token_logprobs", "input_token_logprobs"} & set(reply["meta_info"])


async def test_a_server_names_requests_that_have_no_name(subject: Subject) -> None:
    """Each otherwise."""
    one, two = [(await subject.generate(rid=None))["meta_info"]["id"] for _ in range(2)]
    assert one and two and one != two


async def test_unknown_keys_outside_of_the_sampling_parameters_are_ignored(subject: Subject) -> None:
    """Also our own misspellings."""
    assert len((await subject.generate(no_such_key=1))["output_ids"]) == 4


async def test_null_means_the_default(subject: Subject) -> None:
    """Of every key that we send."""
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "sampling_seed"))
    reply = await subject.generate(sampling=nulls, lora_path=None, extra_key=None)
    expected = subject.logprobs([5, 6, 7, 8, *reply["output_ids"]], 4)
    np.testing.assert_allclose(outputs(reply), expected, atol=CLOSE)


async def test_a_batch_is_answered_in_order(subject: Subject) -> None:
    """A list of prompts gives a list of replies."""
    if await subject.differs():
        return
    replies = await subject.generate([[5, 6], [7, 8, 9]])  # type: ignore[list-item]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 3]


async def test_one_prompt_can_have_two_samples(subject: Subject) -> None:
    """With ``n`` the reply is a list too."""
    if await subject.differs():
        return
    assert len(await subject.generate(sampling={"n": 2})) == 2


async def test_a_stream_ends_with_done(subject: Subject) -> None:
    """Each event repeats everything so far."""
    if await subject.differs():
        return
    text = await subject.generate(stream=True)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert len(orjson.loads(events[-2])["output_ids"]) == 4


async def test_a_text_can_be_the_prompt(subject: Subject) -> None:
    """The server tokenises it."""
    if await subject.differs():
        return
    reply = await subject.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 1}})
    assert reply["meta_info"]["prompt_tokens"] == 3
