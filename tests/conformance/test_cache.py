"""The prefix cache: namespaces and flushes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from tests.conformance.subject import LONG, Subject

PROMPT = list(range(5, 40))


async def _cached(subject: Subject, ids: Sequence[int] = tuple(PROMPT), **options: Any) -> int:
    return int((await subject.generate(ids, **options))["meta_info"]["cached_tokens"])


async def test_a_prompt_is_found_again_but_for_its_last_token(subject: Subject) -> None:
    """And so is the beginning of a longer one."""
    assert await _cached(subject) == 0
    assert await _cached(subject) == len(PROMPT) - 1
    assert await _cached(subject, [*PROMPT, 41, 42]) in (len(PROMPT), len(PROMPT) + 1)


async def test_the_next_turn_finds_the_tokens_of_the_last(subject: Subject) -> None:
    """All but the newest, which was sampled and not yet computed."""
    reply = await subject.generate(PROMPT, new=8)
    assert await _cached(subject, [*PROMPT, *reply["output_ids"], 41]) == len(PROMPT) + 7


@pytest.mark.parametrize("key", ["extra_key", "cache_salt"])
async def test_each_key_has_a_cache_of_its_own(subject: Subject, key: str) -> None:
    """Both keys must agree, and an empty one is none."""
    assert await _cached(subject) == 0
    for _ in range(2):
        assert await _cached(subject, PROMPT, **{key: ""}) == len(PROMPT) - 1
    for value in ("one", "two"):
        assert await _cached(subject, PROMPT, **{key: value}) == 0
        assert await _cached(subject, PROMPT, **{key: value}) == len(PROMPT) - 1
    assert await _cached(subject, extra_key="one", cache_salt="one") == 0


async def test_scored_positions_are_computed_anew(subject: Subject) -> None:
    """So that a probe of the whole prompt uses no cache."""
    await subject.generate(PROMPT)
    reply = await subject.generate(PROMPT, logprob_start_len=0)
    assert reply["meta_info"]["cached_tokens"] == 0


async def test_a_flush_forgets_everything(subject: Subject) -> None:
    """If nothing runs."""
    await subject.generate(PROMPT)
    assert (await subject.post("/flush_cache")).startswith("Cache flushed.")
    assert await _cached(subject) == 0


async def test_a_flush_is_refused_while_something_runs(subject: Subject) -> None:
    """And forgets nothing."""
    await subject.generate(PROMPT)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(subject.call(rid="r", new=LONG))
        await subject.until_running()
        assert (await subject.post("/flush_cache", status=400)).startswith("Flush cache failed.")
        await subject.post("/abort_request", {"rid": "r"})
    assert await _cached(subject) == len(PROMPT) - 1
