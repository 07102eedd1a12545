"""The engine's decisions: what ends a request, who shares, who is retracted, whose weights a token is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from tests.tinymodels import CLOSE

if TYPE_CHECKING:
    from asyncrl.servers.embedded.engine import Engine
    from asyncrl.servers.embedded.request import Request

MakeEngine = Callable[..., "Engine"]
MakeRequest = Callable[..., "Request"]
PROMPT = [10, 11, 12, 13]


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    """Run ``requests`` to their ends."""
    engine.waiting.extend(requests)
    while not engine.idle:
        engine.step()


def output(request: Request) -> list[int]:
    """The ids it has sampled."""
    return request.tokens[request.prompt_tokens :].tolist()


@pytest.fixture
def sampled(make_engine: MakeEngine, make_request: MakeRequest) -> list[int]:
    """Twelve tokens after PROMPT with seed 3; the tests that follow stop within them."""
    request = make_request(PROMPT, max_new_tokens=12, sampling_seed=3)
    finish(make_engine(), [request])
    assert request.finish_reason == {"type": "length", "length": 12}
    return output(request)


def test_a_seed_repeats_whatever_runs_beside_it(
    sampled: list[int], make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """The draws of a seeded request are its own."""
    requests = [make_request(PROMPT, max_new_tokens=12, sampling_seed=seed) for seed in (1, 2, 3)]
    finish(make_engine(), [make_request([5]), *requests])
    assert output(requests[2]) == sampled
    assert output(requests[0]) != sampled


def test_a_stop_token_ends_and_is_kept(sampled: list[int], make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """It is the last id, with its log-probability."""
    stop = sampled[4]
    request = make_request(PROMPT, max_new_tokens=12, sampling_seed=3, stop_ids=[stop])
    finish(make_engine(), [request])
    assert output(request) == sampled[: sampled.index(stop) + 1]
    assert len(request.logprobs) == request.output_tokens
    assert request.finish_reason == {"type": "stop", "matched": stop}


def test_a_stop_string_ends_with_the_token_that_completes_it(
    sampled: list[int], make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """It is looked for in the decoded text, so it may span tokens."""
    engine = make_engine()
    stop = engine._tokenizer.decode(sampled[4:7])
    request = make_request(PROMPT, max_new_tokens=12, sampling_seed=3, stop=["?", stop])
    finish(engine, [request])
    assert output(request) == sampled[:7]
    assert request.finish_reason == {"type": "stop", "matched": stop}


def test_siblings_wait_for_the_first_and_share_its_prompt(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """A group's prompt is computed once, and the group is decoding after two passes."""
    engine = make_engine()
    group = [make_request([*range(10, 40)], max_new_tokens=3, sampling_seed=i) for i in range(6)]
    engine.waiting.extend(group)
    engine.step()
    assert engine.running == group[:1]
    engine.step()
    assert engine.running == group
    assert [request.cached_tokens for request in group] == [0, *[29] * 5]


@pytest.mark.parametrize("option", ["extra_key", "cache_salt"])
def test_keys_separate_the_prefix_cache(option: str, make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Each namespace has its own first use."""
    engine = make_engine()
    found = []
    for key in ("a", "a", "b"):
        request = make_request(PROMPT, max_new_tokens=1, **{option: key})
        finish(engine, [request])
        found.append(request.cached_tokens)
    assert found == [0, 3, 0]


def test_a_full_pool_retracts_the_youngest_and_nothing_is_lost(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """Every request ends with the tokens and log-probabilities that it has in a pool with room for all."""

    def requests() -> list[Request]:
        return [make_request([10 + i, 20, 30], max_new_tokens=20, sampling_seed=i) for i in range(5)]

    roomy, tight = requests(), requests()
    finish(make_engine(), roomy)
    engine = make_engine(slots=50)
    finish(engine, tight)
    assert [output(request) for request in tight] == [output(request) for request in roomy]
    for request, expected in zip(tight, roomy, strict=True):
        assert request.logprobs == pytest.approx(expected.logprobs, abs=CLOSE)
    assert tight[0].retractions == 0 < tight[4].retractions
    engine.cache.clear()
    assert engine.cache.free == 50


def test_retracted_requests_go_on_before_those_that_never_ran(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """In their old order."""
    engine = make_engine(max_running_requests=2)
    requests = [make_request([10 + i], max_new_tokens=4) for i in range(3)]
    engine.waiting.extend(requests)
    engine.step()
    engine.retract_all()
    assert list(engine.waiting) == requests


def test_no_more_run_than_are_allowed(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """The others wait, oldest first."""
    engine = make_engine(max_running_requests=2)
    requests = [make_request([10 + i], max_new_tokens=4) for i in range(3)]
    engine.waiting.extend(requests)
    engine.step()
    engine.step()
    assert engine.running == requests[:2]
    assert list(engine.waiting) == requests[2:]


def test_an_aborted_request_keeps_what_it_has(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Running and waiting ones end in SGLang's two ways; an unknown rid is nothing."""
    engine = make_engine(max_running_requests=1)
    running, waiting = make_request(PROMPT, rid="running"), make_request(PROMPT, rid="waiting")
    engine.waiting.extend([running, waiting])
    for _ in range(3):
        engine.step()
    assert engine.abort("run") == []
    assert engine.abort("running") == [running]
    assert engine.abort("waiting") == [waiting]
    assert running.output_tokens == len(running.logprobs) == 3
    assert running.finish_reason == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert waiting.finish_reason == {"type": "abort", "message": "Abort in waiting queue"}
    assert engine.idle


def test_tokens_carry_the_label_of_their_weights(
    make_engine: MakeEngine, make_request: MakeRequest, tiny_model: Callable[..., object]
) -> None:
    """Also across a retraction; labels without tokens in between leave no span."""
    engine = make_engine()
    request = make_request(PROMPT, max_new_tokens=6)
    engine.waiting.append(request)
    engine.step()
    engine.step()
    for label in ("1", "2"):
        engine.load_weights(tiny_model(seed=1), label)  # type: ignore[arg-type]
    engine.retract_all()
    while not engine.idle:
        engine.step()
    assert request.versions == [("default", 0), ("2", 2)]
    assert request.retractions == 1


def test_a_flush_is_refused_while_something_runs_or_waits(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    """Waiting requests do not count if they are said not to."""
    engine = make_engine()
    request = make_request(PROMPT, max_new_tokens=3)
    engine.waiting.append(request)
    engine.step()
    assert not engine.flush(ignore_waiting=True)
    engine.retract_all()
    assert not engine.flush(ignore_waiting=False)
    assert engine.cache.free < engine.cache.slots
    assert engine.flush(ignore_waiting=True)
    assert engine.cache.free == engine.cache.slots
