"""Whose code an error comes from: the place in the user's own files, and a traceback of them with the rest folded.

The user's code is what is neither Python's, nor installed, nor asyncrl's: recipes' files, scripts, notebooks, and the
example environments, which are there to be changed. What Python and libraries do in between is one line of a
traceback, and the user's innermost line is the place. Only ``folded_traceback`` reads files.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType

import asyncrl

__all__ = ["UserTraceback", "folded_traceback", "is_user_file", "place_in_thread", "place_of"]

_OURS = str(Path(asyncrl.__file__).parent) + os.sep
_EXAMPLES = _OURS + "envs" + os.sep
# Where an installed package has them.
_FOLDERS = {Path(os.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))}
_PYTHON = tuple(str(form) + os.sep for folder in _FOLDERS for form in (folder, folder.resolve()))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_TYPED = ("<ipython-input", "<stdin>", "<console>", "<python-input")
# In a notebook or at a prompt. Other names in brackets are Python's own modules and code that libraries write.
_SHOWN = 3
# Lines of user code in a traceback. Recursion has a thousand.


class UserTraceback(Exception):
    """The user's lines of an error that has none itself: it was raised in another process, or for a call that was given
    up. ``place`` and ``lines`` are what this module finds there. It is the error's cause, so that it is shown with it.
    """

    def __init__(self, place: str, lines: str) -> None:
        super().__init__(place, lines)
        self.place = place
        self.lines = lines

    def __str__(self) -> str:
        return f"in the user's code:\n{self.lines or self.place}"

    @classmethod
    def of(cls, error: BaseException) -> UserTraceback:
        """Of an error that was raised in this process."""
        return cls(place_of(error), folded_traceback(error))


def is_user_file(file: str) -> bool:
    """True if code of that file name is the user's."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    if file.startswith(_OURS):
        return file.startswith(_EXAMPLES)
    # Commands beside the interpreter, such as this one, are installed too.
    beside = str(Path(file).parent) == str(Path(sys.executable).parent)
    return not file.startswith(_PYTHON) and not beside and not any(part in file for part in _INSTALLED)


def place_of(error: BaseException | None) -> str:
    """The user's innermost line that an error came through, or what caused it: ``/home/me/sums.py:14 in Sums.reward``.

    Empty if there is none. Of a group of errors the first counts, of a syntax error the line that has it.
    """
    for found in _chain(error):
        if isinstance(found, UserTraceback):
            place = found.place
        elif file := _unreadable(found):
            place = file
        else:
            place = _innermost(found)
        if place:
            return place
    return ""


def folded_traceback(error: BaseException | None) -> str:
    """The user's lines that an error came through, outermost first, as Python prints them; without the error itself.

    What others do in between is one line, a repeated line is one, and of many the innermost are shown. Empty if there
    is none. Reads the source files.
    """
    for found in _chain(error):
        if isinstance(found, UserTraceback):
            return found.lines
        lines = traceback.format_exception_only(found)[:-1] if _unreadable(found) else _folded(found)
        if lines:
            return "".join(lines).rstrip()
    return ""


def place_in_thread(identity: int) -> str:
    """The user's innermost line that a thread is running now; empty if it runs none."""
    frame = sys._current_frames().get(identity)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}{_function(frame)}"
        frame = frame.f_back
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Whatever may have lines of the user, the nearest to the fault first."""
    seen: list[BaseException] = []
    while error is not None and not any(error is known for known in seen):
        seen.append(error)
        if isinstance(error, BaseExceptionGroup):
            yield from _chain(error.exceptions[0])
        if isinstance(error.__cause__, UserTraceback):
            yield error.__cause__
        yield error
        error = error.__cause__


def _unreadable(error: BaseException) -> str:
    """The place of a syntax error in a file. What is compiled from text has no file of an absolute name."""
    file = error.filename if isinstance(error, SyntaxError) else None
    return f"{file}:{error.lineno or 1}" if file and os.path.isabs(file) else ""  # type: ignore[attr-defined]  # noqa: PTH117


def _innermost(error: BaseException) -> str:
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_user_file(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line}{_function(frame)}"
    return found


def _function(frame: FrameType) -> str:
    name = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    return "" if name == "<module>" else f" in {name}"


def _folded(error: BaseException) -> list[str]:
    """The user's lines, with one line for what stands between two of them or below the last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    entries = list(zip(traceback.extract_tb(error.__traceback__), frames, strict=True))
    lines: list[str] = []
    shown = 0
    called = next((index for index, entry in enumerate(entries) if _user_line(entry)), len(entries))
    # Before that are those who called the user's code.
    for line, repeated in groupby(reversed(entries[called:]), key=_user_line):  # from the innermost
        run = list(repeated)
        if line is None:
            packages = dict.fromkeys(_package(frame) for _, frame in reversed(run))
            lines.append(f"  [{_count(len(run), 'call')} in {', '.join(packages)}]\n")
            continue
        if shown == _SHOWN:
            lines.append("  [and more above]\n")
            break
        if len(run) > 1:
            lines.append(f"  [the same line {_count(len(run) - 1, 'more time')}]\n")
        summary = run[0][0]
        if shown:  # what stands where in a line is said of the innermost
            summary = traceback.FrameSummary(summary.filename, summary.lineno, summary.name, line=summary.line)
        lines += traceback.format_list([summary])
        shown += 1
    return lines[::-1]


def _user_line(entry: tuple[traceback.FrameSummary, FrameType]) -> tuple[str, int | None] | None:
    """The same for a line of the user and the same line below it; None for any of others."""
    summary, _ = entry
    return (summary.filename, summary.lineno) if is_user_file(summary.filename) else None


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?")).partition(".")[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
