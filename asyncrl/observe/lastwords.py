"""What is said of the error that ends a command: what it is, where in the user's code, and what to do. A few lines."""

from __future__ import annotations

from asyncrl.errors import ConfigError, NothingTrained
from asyncrl.rollout.usercode import folded_traceback, place_of

__all__ = ["last_words"]

_TEXT, _TRACE, _NOTES = 4, 6, 3
# Lines of each at most. --debug has them all.


def last_words(error: BaseException, *, refused: bool) -> str:
    """Type, text, place, the user's lines, notes, and the next step: at most fifteen lines, for ``error``.

    ``refused``: it is a wrong option, and nothing has begun.
    """
    place, trace = place_of(error), folded_traceback(error)
    text = str(error) if refused else f"failed: {type(error).__name__}: {error}"
    if place and place.partition(" in ")[0] not in text:
        text = f"{text}\n  at {place}"
    lines = _first(text.splitlines(), _TEXT)
    if trace:
        lines += _last(trace.splitlines(), _TRACE)
    notes = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
    return "\n".join([*lines, *_first(notes, _NOTES), *_next(error, place, refused=refused)])


def _next(error: BaseException, place: str, *, refused: bool) -> list[str]:
    if isinstance(error, NothingTrained):
        return []  # it says what to do itself
    if place:
        return ["mend that line and run it again (asyncrl check tries an environment in seconds); --debug says more"]
    return [] if refused or isinstance(error, ConfigError) else ["--debug shows the whole traceback"]


def _first(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"[{len(lines) - most} more lines: --debug]"]


def _last(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [f"  [{len(lines) - most} more lines: --debug]", *lines[-most:]]
