"""How long the trainer waited for slots that only a publication frees: seconds that no faster sampling would save."""

from __future__ import annotations

import anyio

__all__ = ["SlotWait"]


class SlotWait:
    """Owns the seconds. ``note`` is called at each change; between two calls nothing changes."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def note(self, *, waits: bool) -> None:
        """From now on the trainer waits for such a slot, or does not."""
        if waits and self._since is None:
            self._since = anyio.current_time()
        elif not waits and self._since is not None:
            self._seconds += anyio.current_time() - self._since
            self._since = None

    def take(self) -> float:
        """The seconds since the last call. Nobody waits at the moment."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
