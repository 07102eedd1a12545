"""Errors: each layer of the server has a body of its own shape."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.sampling.wire import error_text
from tests.conformance.subject import CONTEXT, Subject


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 4},
        {"max_new_tokens": "4"},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": True},
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"ignore_eos": 1},
        {"stop": [5]},
        {"stop_token_ids": "5"},
        {"stop_token_ids": ["5"]},
    ],
)
async def test_sampling_parameters_of_a_wrong_name_or_type_are_a_text(
    subject: Subject, sampling: dict[str, Any]
) -> None:
    """``error`` is a string; one for an unknown name says which are known."""
    refusal = await subject.generate(sampling=sampling, status=400)
    assert isinstance(refusal["error"], str)
    if "max_tokens" in sampling:
        assert refusal["error"].startswith("unknown field `max_tokens`, expected one of ")
        assert "max_new_tokens" in refusal["error"]


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top_p must be in (0, 1]"),
        ({"top_p": 1.5}, "top_p must be in (0, 1]"),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0"),
        ({"top_k": -2}, "top_k must be -1 (disable) or at least 1, got -2"),
        ({"min_p": 2}, "min_p must be in [0, 1]"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
    ],
)
async def test_sampling_parameters_out_of_range_are_an_object(
    subject: Subject, sampling: dict[str, Any], text: str
) -> None:
    """``error`` has a message with the value."""
    refusal = await subject.generate(sampling=sampling, status=400)
    assert refusal["error"]["message"].startswith(text)


@pytest.mark.parametrize(
    "change",
    [
        {"rid": 5},
        {"input_ids": "abc"},
        {"input_ids": [1.5]},
        {"lora_path": 5},
        {"extra_key": 5},
        {"logprob_start_len": "a"},
    ],
)
async def test_bodies_of_a_wrong_type_have_the_code_inside(subject: Subject, change: dict[str, Any]) -> None:
    """``object``, ``message``, ``type`` and ``code`` on the top level."""
    content = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}} | change
    refusal = await subject.post("/generate", content, status=400)
    assert (refusal["object"], refusal["type"], refusal["code"]) == ("error", "Bad Request", 400)
    assert isinstance(refusal["message"], str)


@pytest.mark.parametrize("content", [b"{", b"[]"])
async def test_a_body_that_is_no_object_is_refused(subject: Subject, content: bytes) -> None:
    """In the same shape."""
    response = await subject.client.post("/generate", content=content)
    assert response.status_code == 400
    assert response.json()["object"] == "error"


@pytest.mark.parametrize(
    ("ids", "text"), [([], "input_ids cannot be empty."), (None, "Either text, input_ids or input_embeds should be")]
)
async def test_a_request_needs_a_prompt(subject: Subject, ids: list[int] | None, text: str) -> None:
    """An empty one is none."""
    content = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
    assert (await subject.post("/generate", content, status=400))["error"]["message"].startswith(text)


@pytest.mark.parametrize(
    ("length", "new", "text"),
    [
        (CONTEXT, 1, f"The input ({CONTEXT} tokens) is longer than the model's context length ({CONTEXT} tokens)."),
        (CONTEXT - 48, 49, f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens."),
        (CONTEXT - 6, 1, f"Input length ({CONTEXT - 6} tokens) exceeds the maximum allowed length"),
    ],
)
async def test_what_is_too_long_is_refused_with_the_limit(subject: Subject, length: int, new: int, text: str) -> None:
    """Before anything runs."""
    refusal = await subject.generate([5] * length, new=new, status=400)
    assert refusal["error"]["message"].startswith(text)


async def test_the_longest_prompt_is_accepted(subject: Subject) -> None:
    """One less than what ``/server_info`` says."""
    longest = (await subject.get("/server_info"))["max_req_input_len"] - 1
    assert longest == CONTEXT - 7
    assert len((await subject.generate([5] * longest, new=1))["output_ids"]) == 1


@pytest.mark.parametrize("ids", [[-1], [1_000]])
async def test_an_id_outside_of_the_vocabulary_is_refused(subject: Subject, ids: list[int]) -> None:
    """By our own servers."""
    if await subject.differs():
        return
    assert "vocabulary" in (await subject.generate([5, *ids], status=400))["error"]["message"]


async def test_unknown_routes_and_methods_are_refused(subject: Subject) -> None:
    """As web frameworks do."""
    assert await subject.get("/no_such_route", status=404) == {"detail": "Not Found"}
    await subject.get("/abort_request", status=405)


async def test_the_client_reads_every_shape(subject: Subject) -> None:
    """So that a user sees the server's words."""
    contents: list[dict[str, Any]] = [{"rid": 5}, {"input_ids": []}, {"input_ids": [5], "sampling_params": {"x": 1}}]
    for content in contents:
        response = await subject.client.post("/generate", json=content)
        text = error_text(response.status_code, response.content)
        assert text.startswith("status 400: ")
        assert not text.startswith("status 400: {")
