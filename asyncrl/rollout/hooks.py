"""The functions of an environment that a trajectory has called, as far as it says that itself. Pure functions."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from asyncrl.errors import SamplingError
from asyncrl.rollout.failures import is_accident
from asyncrl.types import Trajectory

__all__ = ["called_hooks", "failed_hook", "note_origin"]

_ORIGIN = "while the environment's "


def failed_hook(traj: Trajectory) -> str:
    """The function that ``traj.error`` came from: ``reset`` (and what makes the environment), ``on_turn``, ``reward``
    or ``on_truncated``; with what asyncrl makes of its value. Empty if it was none of them.
    """
    if traj.error is None or isinstance(traj.error, SamplingError):
        return ""
    if traj.truncated is not None:
        return "on_truncated"
    if traj.over:
        return "reward"
    if not traj.spans:
        return "reset"
    return "on_turn" if traj.awaiting_reply else ""


def called_hooks(traj: Trajectory) -> Mapping[str, bool]:
    """Each function that was called, and whether it was sound. One that the machinery failed is left out."""
    called = {}
    if traj.spans:
        called["reset"] = True
    if traj.turns:
        called["on_turn"] = True
    if traj.reward is not None:
        called["reward" if traj.truncated is None else "on_truncated"] = True
    if failed := failed_hook(traj):
        called[failed] = False
        if is_accident(traj.error):
            del called[failed]
    return called


def note_origin(traj: Trajectory) -> None:
    """Add a note to ``traj.error`` that says which function of the environment raised it, and for which row."""
    hook, error = failed_hook(traj), traj.error
    if not hook or error is None or any(note.startswith(_ORIGIN) for note in getattr(error, "__notes__", ())):
        return  # the user may raise the same object again and again
    row = reprlib.repr(traj.row)
    error.add_note(f"{_ORIGIN}{hook} ran for row {row} (group {traj.group}, member {traj.member})")
