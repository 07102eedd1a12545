"""Requests that are to end before their time: aborted until they were answered, and taken away if they never are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

from asyncrl.sampling.pool import Pool, Running

__all__ = ["Aborter", "end"]

_ANSWER_S = 30.0
_REPEAT_S = 2.0


class Aborter(Protocol):
    """What ends requests: a server, or a router by way of its servers."""

    async def abort(self, rid: str) -> bool:
        """End one request; False if nobody took that."""
        ...


async def end(pool: Pool, url: str, chosen: Callable[[Running], bool], aborter: Aborter, *, waits: bool = True) -> None:
    """Abort those of our requests on ``url`` that are ``chosen``, and wait until they were answered.

    One that is not answered within half a minute is taken away: it goes on elsewhere. Not ``waits``: each is aborted
    once, and that is all.
    """

    def left() -> list[Running]:
        return [running for running in pool.running(url) if chosen(running)]

    with anyio.move_on_after(_ANSWER_S):
        while unanswered := left():
            # Again and again, for an abort has no effect if it overtakes its request.
            async with anyio.create_task_group() as tasks:
                for running in unanswered:
                    tasks.start_soon(aborter.abort, running.rid)
            if not waits:
                return
            with anyio.move_on_after(_REPEAT_S):
                await pool.traffic.wait_until(lambda: not left())
    for running in left():
        running.held.interrupt()
