"""The task: a number is asked for by its name, the model has to write its digit, and another model judges the answer.

prompt      seven
model       7
judge       10
"""

from __future__ import annotations

import functools
import json
import re

import anyio
import asyncrl as rl
import httpx

ATTEMPTS = 3
PROMPT = """\
Question: {question}
Expected answer: {expected}
Given answer: {given}
Grade the given answer from 0 (wrong) to 10 (right). Reply with the number only."""


class Judged(rl.Env):
    """One question, one answer. ``judge_url`` and ``judge_model`` are keys of [env] in the recipe."""

    def __init__(self, judge_url: str = "", judge_model: str = "judge") -> None:
        self.judge = judge_at(judge_url, judge_model)

    async def reset(self, row):
        """The messages that a conversation begins with. ``row`` is a line of rows.jsonl."""
        return [{"role": "user", "content": row["question"]}]

    async def reward(self, traj, row):
        """The grade. A reward may wait: other conversations go on meanwhile."""
        return await self.judge.grade(row["question"], row["answer"], traj.final_text)


class Judge:
    """``url``: up to and without ``/chat/completions``, such as "http://localhost:8000/v1"; empty is the stand-in."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._client = httpx.AsyncClient(
            base_url=url or "http://stand-in",
            timeout=httpx.Timeout(30.0, pool=None),
            limits=httpx.Limits(max_connections=32),  # what else comes waits for its turn
            transport=None if url else httpx.MockTransport(stand_in),
        )

    async def grade(self, question: str, expected: str, given: str) -> float:
        """From 0 to 1. Raises ``InfrastructureError`` if there is no grade: the conversation is then tried again,
        for a judge that is down must not become a reward of 0."""
        content = PROMPT.format(question=question, expected=expected, given=given)
        body = {"model": self._model, "messages": [{"role": "user", "content": content}], "temperature": 0.0}
        failure = ""
        for attempt in range(ATTEMPTS):
            await anyio.sleep(2.0**attempt - 1.0)  # 0, 1 and 3 seconds
            try:
                response = await self._client.post("chat/completions", json=body)
                response.raise_for_status()
                text = str(response.json()["choices"][0]["message"]["content"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if found := re.fullmatch(r"\s*(10|\d)\s*", text):
                return int(found[1]) / 10
            failure = f"it said {text!r}, which is no grade"
        raise rl.InfrastructureError(f"the judge gave no grade in {ATTEMPTS} attempts: {failure}")


@functools.cache
def judge_at(url: str, model: str) -> Judge:
    """One judge for all conversations, whose connections are kept."""
    return Judge(url, model)


def stand_in(request: httpx.Request) -> httpx.Response:
    """What a judge would reply, without one: 10 for the expected answer, 0 for any other."""
    prompt = json.loads(request.content)["messages"][-1]["content"]
    expected, given = (re.search(rf"{which} answer: (.*)", prompt)[1].strip() for which in ("Expected", "Given"))
    grade = 10 if given == expected else 0
    return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": str(grade)}}]})
