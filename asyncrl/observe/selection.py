"""Which kept conversations somebody wants to read. Blocking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.observe.conversations import calls_of, merit, said, value_text
from asyncrl.observe.rollouts import RolloutFile, read_rollouts, rollout_files

__all__ = ["Choice", "chosen", "selected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is wanted."""

    step: int | None = None
    """None: the last one that is kept, or all of them if ``grep`` looks for a text."""
    evaluation: bool = False
    """Evaluations, in the place of steps."""
    group: int | None = None
    best: bool = False
    worst: bool = False
    """Of each group, as they were marked when they were kept."""
    grep: str = ""
    """Text that must be in the row, the messages or the error; upper and lower case are the same."""


def selected(directory: Path, choice: Choice) -> Iterator[dict[str, Any]]:
    """The trajectories of a run, file by file: in their order there, or by reward if only best or worst are wanted.

    Raises ``ConfigError`` if nothing is kept of the step, or of the run.
    """
    for n in _numbers(directory, choice):
        for file in read_rollouts(directory, step=n, evaluation=None if choice.evaluation else ""):
            if bool(file.evaluation) is choice.evaluation:
                yield from chosen(file, choice)


def _numbers(directory: Path, choice: Choice) -> list[int]:
    files = [n for n, name, _ in rollout_files(directory) if bool(name) is choice.evaluation]
    kept = sorted(set(files))
    what = "evaluation" if choice.evaluation else "step"
    if not kept:
        raise ConfigError(
            f"RUN is {str(directory)!r}, which has no conversations of any {what}: none has ended yet, or the run does "
            'not keep them (run.rollouts = "none"; "extremes", the default, keeps the best and the worst of each group)'
        )
    if choice.step is None:
        return kept if choice.grep else kept[-1:]
    if choice.step in kept:
        return [choice.step]
    near = sorted(sorted(kept, key=lambda n: abs(n - (choice.step or 0)))[:2])
    raise ConfigError.for_value(
        "--step",
        choice.step,
        f"{'one that an evaluation followed' if choice.evaluation else 'a step'} of which conversations are kept: the "
        f"nearest are {' and '.join(map(str, near))}, of {len(kept)} from {kept[0]} to {kept[-1]}",
    )


def chosen(file: RolloutFile, choice: Choice) -> list[dict[str, Any]]:
    """Those of ``file``."""
    found = [traj for traj in file.trajectories if _is_chosen(traj, choice)]
    if choice.best != choice.worst:
        found.sort(key=lambda traj: merit(traj.get("reward")), reverse=choice.best)
    return found


def _is_chosen(traj: Mapping[str, Any], choice: Choice) -> bool:
    if choice.group not in (None, traj["group"]):
        return False
    wanted = [name for name in ("best", "worst") if getattr(choice, name)]
    if wanted and not any(traj.get(name) for name in wanted):
        return False
    return not choice.grep or choice.grep.casefold() in "\n".join(_texts(traj)).casefold()


def _texts(traj: Mapping[str, Any]) -> Iterator[str]:
    yield value_text(traj.get("row"))
    yield str(traj.get("error") or "")
    for message in traj["messages"]:
        yield said(message)
        yield from calls_of(message)
