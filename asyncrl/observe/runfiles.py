"""What a run directory says about its run, read by others than the run: while it goes on, or after a kill.

Nothing is required but the folder. What is missing, half written or damaged is left out, and damaged lines are counted.
``events.jsonl`` may be long: it is read once, line by line, and only lines of the few events below are parsed. All of
this blocks.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from asyncrl.files import is_locked, reading
from asyncrl.types import BarrierWait

__all__ = ["Folded", "RunFiles", "read_run"]

_LONGEST_WAITS = 3
_MOST_KINDS = 1000
# Of failures that are told apart: an error may have another text each time.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(slots=True, kw_only=True)
class Folded:
    """So many events of one kind; the texts are of the last one."""

    text: str
    where: str = ""
    todo: str = ""
    """What it means, and what to do about it."""
    count: int = 0


@dataclass(slots=True, kw_only=True)
class RunFiles:
    """What is known of a run."""

    directory: Path
    about: Mapping[str, Any] = field(default_factory=dict)
    """``run.json``; empty if it cannot be read."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each step, its number ``n`` among them. A step that was made again counts once."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """The metrics of each, and the ``version`` that was measured."""
    waits: list[BarrierWait] = field(default_factory=list)
    """The longest ones at the barrier, longest first."""
    failures: list[Folded] = field(default_factory=list)
    """Of members and tools: most frequent first."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> groups that were not trained."""
    notices: list[Folded] = field(default_factory=list)
    """Warnings, most frequent first."""
    ended: Mapping[str, Any] | None = None
    """The event ``run_ended``, if the run has ended since it was last begun and could say so."""
    running: bool = False
    """A process holds the folder."""
    written: float | None = None
    """Seconds since 1970: when the run last wrote metrics or events."""
    unreadable: int = 0
    """Lines that are damaged."""

    @property
    def planned(self) -> int | None:
        """The number of steps that the run is to have."""
        steps = self.about.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def recipe(self) -> object:
        """The file of the recipe or script that the run is from; None if that is not known."""
        origin = self.about.get("origin")
        return origin.get("path") if isinstance(origin, dict) else None

    def plan(self, key: str) -> Any:
        """An option of the run as it was resolved; None if that is not known."""
        plan = self.about.get("plan")
        return plan.get(key) if isinstance(plan, dict) else None

    def configured(self, section: str, key: str) -> Any:
        """What the recipe says; None if it says nothing."""
        configuration = self.about.get("configuration")
        values = configuration.get(section) if isinstance(configuration, dict) else None
        return values.get(key) if isinstance(values, dict) else None

    def series(self, key: str) -> list[float]:
        """A metric in all steps; NaN where it is missing."""
        return [step.get(key, math.nan) for step in self.steps]


def read_run(directory: Path) -> RunFiles:
    """Whatever there is in ``directory``. Raises ``CheckpointError`` if the system refuses to read a file."""
    run = RunFiles(directory=directory, about=_about(directory / "run.json"), running=is_locked(directory))
    for name in ("metrics.jsonl", "events.jsonl"):
        path = directory / name
        if path.is_file():
            run.written = max(run.written or 0.0, path.stat().st_mtime)
    _read_steps(run)
    _EventReader(run).read()
    return run


def _about(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with reading(path):
        content = path.read_bytes()
    try:
        value = orjson.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read_steps(run: RunFiles) -> None:
    for value in _values(run, "metrics.jsonl"):
        n = value.get("n")
        if not isinstance(n, int) or isinstance(n, bool):
            run.unreadable += 1
            continue
        while run.steps and run.steps[-1]["n"] >= n:  # a resumed run makes the steps anew that it had not saved
            run.steps.pop()
        run.steps.append(_numbers(value) | {"n": n})


class _EventReader:
    """Reads the events of ``run``."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._failures: dict[tuple[str, str], Folded] = {}
        self._notices: dict[tuple[str, str], Folded] = {}
        self._handlers: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "barrier_opened": self._wait,
            "evaluation_finished": self._evaluation,
            "group_dropped": self._drop,
            "member_failed": self._failure,
            "notice": self._notice,
            "run_ended": self._end,
            "tool_failed": self._tool,
            "version_published": self._begin,
        }

    def read(self) -> None:
        """Read all of them."""
        run = self._run
        wanted = tuple(f'{{"event":"{name}"'.encode() for name in self._handlers)
        for value in _values(run, "events.jsonl", wanted):
            self._handlers[str(value["event"])](value)
        run.waits.sort(key=lambda wait: -wait.seconds)
        run.failures = _most_first(self._failures)
        run.notices = _most_first(self._notices)

    def _wait(self, value: Mapping[str, Any]) -> None:
        wait = value.get("wait")
        if not isinstance(wait, dict):
            self._run.unreadable += 1
            return
        found = BarrierWait(
            seconds=_number(wait.get("seconds"), 0.0),
            group=int(_number(wait.get("group"), -1)),
            member=int(_number(wait.get("member"), -1)),
            doing=str(wait.get("doing") or "unknown"),
        )
        self._run.waits = heapq.nlargest(_LONGEST_WAITS, [*self._run.waits, found], key=lambda known: known.seconds)

    def _evaluation(self, value: Mapping[str, Any]) -> None:
        metrics = _numbers(value.get("metrics"))
        self._run.evaluations.append(metrics | {"version": _number(value.get("version"))})

    def _drop(self, value: Mapping[str, Any]) -> None:
        reason = str(value.get("reason"))
        if reason != "run_ended":  # that is how every run ends
            self._run.dropped[reason] += 1

    def _failure(self, value: Mapping[str, Any]) -> None:
        _fold(self._failures, str(value.get("error")), str(value.get("where") or ""))

    def _tool(self, value: Mapping[str, Any]) -> None:
        text = f"tool {value.get('tool')}: {value.get('error')}"
        _fold(self._failures, text, str(value.get("where") or ""))

    def _notice(self, value: Mapping[str, Any]) -> None:
        if value.get("level") in ("warning", "error", "critical"):
            name, keys = str(value.get("name")), value.get("keys")
            said = ", ".join(f"{key} {item}" for key, item in keys.items()) if isinstance(keys, dict) else ""
            text, hint = f"{name}: {said}" if said else name, value.get("hint")
            _fold(self._notices, text, "", kind=name, todo=hint if isinstance(hint, str) else "")

    def _begin(self, value: Mapping[str, Any]) -> None:
        self._run.ended = None  # a run that goes on publishes before anything else

    def _end(self, value: Mapping[str, Any]) -> None:
        self._run.ended = value


def _fold(known: dict[tuple[str, str], Folded], text: str, where: str, *, kind: str = "", todo: str = "") -> None:
    # The same place raises the same kind of error, whatever numbers and names are in its text.
    key = (kind or (text.partition(":")[0] if where else _VARYING.sub("0", text[:200])), where)
    if key not in known and len(known) >= _MOST_KINDS:
        key, text, where, todo = ("", ""), "others", "", ""
    entry = known.setdefault(key, Folded(text=text, where=where))
    entry.text, entry.todo = text, todo
    entry.count += 1


def _most_first(known: Mapping[tuple[str, str], Folded]) -> list[Folded]:
    return sorted(known.values(), key=lambda entry: -entry.count)


def _values(run: RunFiles, name: str, wanted: tuple[bytes, ...] = (b"",)) -> Iterator[dict[str, Any]]:
    """The lines of a file that begin with one of ``wanted``, as JSON."""
    path = run.directory / name
    if not path.is_file():
        return
    with reading(path), path.open("rb") as file:
        for line in file:
            if not line.startswith(wanted):
                continue
            try:
                value = orjson.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                yield value
            elif line.endswith(b"\n"):  # else it is being written, or was when the run was killed
                run.unreadable += 1


def _numbers(values: object) -> dict[str, float]:
    return {key: _number(value) for key, value in values.items()} if isinstance(values, dict) else {}


def _number(value: object, otherwise: float = math.nan) -> float:
    # JSON has no NaN: what was not finite is null.
    try:
        return float(value) if isinstance(value, int | float) else otherwise
    except OverflowError:
        return otherwise
