r"""Trajectories as a person reads them: a header, the row, and what was said, role by role.

Models print anything, also the sequences that move a terminal's cursor: characters that one cannot see are written out
(``\x1b``). A value of an unexpected shape is shown as JSON; nothing here raises because of what is in a line.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

__all__ = [
    "call_text",
    "calls_of",
    "conversation",
    "merit",
    "number",
    "one_line",
    "said",
    "token_line",
    "value_text",
    "visible",
]

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Control characters but tab and newline, marks that turn the direction of text, and halves of characters.
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def visible(text: str) -> str:
    """``text`` with what acts on a terminal, or is no character, written out."""
    return _UNSEEN.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: str, width: int) -> str:
    """The beginning of ``text`` on a line of ``width`` characters."""
    words = visible(" ".join(text[: 4 * width].split()))
    return words if len(words) <= width and len(text) <= 4 * width else f"{words[: max(0, width - 2)]}.."


def conversation(traj: Mapping[str, Any]) -> Iterator[Text]:
    """Its lines, without a newline at their ends."""
    yield Text(visible("  ".join(_title(traj))), style="bold reverse")
    for name, words in _details(traj):
        yield Text.assemble((f"{name}: ", "dim"), visible(words))
    for message in traj["messages"]:
        yield from _message(message)


def _title(traj: Mapping[str, Any]) -> Iterator[str]:
    n, evaluation = traj.get("n"), traj.get("evaluation")
    yield f"evaluation {evaluation} after step {n}" if evaluation else f"step {n}"
    yield f"group {traj['group']}"
    marks = [name for name in ("best", "worst") if traj.get(name)]
    yield f"member {traj['member']}" + (f" ({' and '.join(marks)} of its group)" if marks else "")
    yield f"reward {number(traj.get('reward'))}"
    if traj.get("truncated"):
        yield f"cut off: {traj['truncated']}"
    if traj.get("dropped"):
        yield f"not trained: {traj['dropped']}"


def _details(traj: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if traj.get("error"):
        where = f"  ({traj['where']})" if traj.get("where") else ""
        yield "error", f"{traj['error']}{where}"
    metrics = traj.get("metrics")
    if isinstance(metrics, dict) and metrics:
        yield "metrics", ", ".join(f"{key} {number(value)}" for key, value in metrics.items())
    yield "sampled", ", ".join(_sampled(traj))
    seconds = traj.get("seconds")
    if isinstance(seconds, dict) and seconds:
        longest = sorted(seconds.items(), key=lambda item: -merit(item[1]))
        yield "seconds", ", ".join(f"{phase} {number(value)}" for phase, value in longest)
    if traj.get("shortened"):
        yield "shortened", "parts of this conversation were not kept (run.rollout_bytes)"
    yield "row", value_text(traj.get("row"))


def _sampled(traj: Mapping[str, Any]) -> Iterator[str]:
    yield f"{traj.get('generated_tokens')} tokens of {traj.get('context_tokens')} in its context"
    yield f"{traj.get('turns')} turns"
    found = traj.get("segments")
    segments = [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []
    versions = [part["version"] for part in segments if isinstance(part.get("version"), int)]
    if versions:
        yield f"policy version {_span(versions)}"
    ages = [part["age"] for part in segments if isinstance(part.get("age"), int)]
    if ages:
        yield f"age {_span(ages)} when trained"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _message(message: Mapping[str, Any]) -> Iterator[Text]:
    role = visible(str(message.get("role") or "?"))
    name = visible(f" {message['name']}") if message.get("name") else ""
    calls = list(calls_of(message))
    first, *others = visible(said(message)).split("\n")
    if first or others or not calls:
        yield Text.assemble((f"{role}{name}: ", f"bold {_ROLE_STYLES.get(role, '')}".strip()), first)
        yield from (Text(f"    {line}") for line in others)
    for call in calls:
        yield Text.assemble((f"{role} calls ", f"bold {_ROLE_STYLES.get(role, '')}".strip()), visible(call))


def said(message: Mapping[str, Any]) -> str:
    """The content of a message, and what the model thought before it. Parts that are no text are JSON."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(
            part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else value_text(part)
            for part in content
        )
    text = content if isinstance(content, str) else "" if content is None else value_text(content)
    thought = message.get("reasoning_content")
    return f"(thinks) {thought}\n{text}" if isinstance(thought, str) and thought else text


def calls_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Its tool calls as Python writes them."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield call_text(call)


def call_text(call: object) -> str:
    """A tool call as Python writes it: ``search(query="x")``."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return value_text(call)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = ", ".join(f"{key}={value_text(value)}" for key, value in arguments.items())
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else value_text(arguments)})"


def number(value: object) -> str:
    """Four digits at most; "none" where there is no number."""
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


def token_line(traj: Mapping[str, Any]) -> Text:
    """All token ids, each that was sampled with its log-probability: ``1 7(-0.25) 9(-1.5)``."""
    tokens, logprobs = traj.get("tokens"), traj.get("logprobs")
    if not isinstance(tokens, list):
        why = "left out, see shortened" if traj.get("shortened") else "not kept (run.rollout_tokens = true keeps them)"
        return Text.assemble(("tokens: ", "dim"), why)
    known = logprobs if isinstance(logprobs, list) else []
    parts = [
        f"{number(token)}({number(logprob)})" if isinstance(logprob, float | int) else number(token)
        for token, logprob in itertools.zip_longest(tokens, known[: len(tokens)])
    ]
    return Text.assemble(("tokens: ", "dim"), visible(" ".join(parts)))


def merit(value: object) -> float:
    """A number to sort by: what is none, or not a number, comes last."""
    if isinstance(value, float):
        return -math.inf if math.isnan(value) else value
    return value if isinstance(value, int) else -math.inf  # one of many digits is no float


def value_text(value: object) -> str:
    """As JSON, on one line."""
    return json.dumps(value, ensure_ascii=False)
