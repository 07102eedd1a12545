"""Where a turn ends: stop strings count over the whole turn, however many requests it took.

A server looks for them in the tokens of one request, and some servers only in the last few of those. What it cannot see
is found here: the segment is cut behind the token that completes the string, as a server does, and the turn is
complete. What was sampled beyond that token is not kept. Costs nothing without stop strings.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

import numpy as np

from asyncrl.rollout.renderer import Renderer
from asyncrl.types import IntArray, Segment, StopReason, Trajectory

__all__ = ["ended"]

_BYTES = 4
# Of a character, at most; a token has at least one.


def ended(segment: Segment, traj: Trajectory, renderer: Renderer) -> Segment:
    """The part of ``segment`` that belongs to the open turn of ``traj``, which it follows.

    It ends with STOP if the turn is complete with it: also if the server was told to abort in the same moment.
    """
    stopped = segment.stop is StopReason.STOP
    if (stopped and not renderer.stop) or not len(segment.tokens):
        return segment
    if renderer.stop:
        before = _tail(traj, _BYTES * (1 + max(map(len, renderer.stop))))
        kept = _completed(before, segment.tokens, renderer)
        if kept is not None:
            return segment if stopped and kept == len(segment.tokens) else segment.cut(kept)
    if not stopped and int(segment.tokens[-1]) in renderer.stop_token_ids:
        return segment.cut(len(segment.tokens))
    return segment


def _completed(before: IntArray, tokens: IntArray, renderer: Renderer) -> int | None:
    """How many of ``tokens`` it takes to complete a stop string; None if there is none."""
    joined = np.concatenate([before, tokens])
    found = partial(_has_stop, joined, len(before), renderer)
    if not found(len(tokens)):
        return None
    return bisect_left(range(1, len(tokens)), True, key=found) + 1


def _has_stop(joined: IntArray, before: int, renderer: Renderer, tokens: int) -> bool:
    text = renderer.text(joined[: before + tokens])
    return any(stop in text for stop in renderer.stop)


def _tail(traj: Trajectory, tokens: int) -> IntArray:
    """The last ``tokens`` of the open turn, or all of it. Looks at no more of the conversation than that."""
    left = min(tokens, traj.turn_tokens)
    parts: list[IntArray] = []
    for span in reversed(traj.spans):
        if left <= 0:
            break
        parts.append(span.tokens[-left:])
        left -= len(parts[-1])
    return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)
