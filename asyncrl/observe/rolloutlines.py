"""Trajectories as JSON lines, within a bound on the bytes of a batch.

One line a trajectory. If the lines of a batch are too long together, the longest ones are shortened until all have
room: first they lose their tokens and log-probabilities, then the middle of their longest messages. Only where there is
no room for even so little, whole trajectories are left out. The last line then says how much is missing.

Nothing here raises because of what users put into rows, messages and metrics: what JSON does not have is written as
text that describes it.

All of this runs in a worker thread. Trajectories of a finished group are read, which nobody changes any more. Python
runs one thread at a time, so the encoder works in small pieces and pauses between them: the event loop does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from asyncrl.events import RolloutsFinished
from asyncrl.observe.kept import KeptMember, KeptRollouts, kept_members
from asyncrl.plain import dumps, error_text, shortened, shown, text
from asyncrl.rollout.usercode import place_of
from asyncrl.types import Group, SpanKind, Trajectory

__all__ = ["encode_rollouts"]

_LEAST_LINE = 4096
_LEAST_MESSAGE = 256
# Bytes: less than that says nothing to anybody.
_LAST_LINE = 128
_PIECE = 16_384
# Characters or numbers that are encoded at once, which takes about 0.1 ms.
_LONGEST_ROLE = 20
_SHORT_TOKENS = 8192
# About 32 KB of text.
_WORK_S, _PAUSE_S = 0.0004, 0.0001
# A thread that does not pause lets the event loop wait for 5 ms each time (``sys.getswitchinterval``).
_LONGEST_LIST = 100_000
_LARGEST_ARRAY_BYTES = 65_536
# Of a row. Of pictures and sounds only the shape is kept.
_LINE_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
_SCALARS = frozenset((int, float, bool, type(None)))
_GENERATED = SpanKind.GENERATED


def encode_rollouts(event: RolloutsFinished, options: KeptRollouts) -> list[bytes]:
    """The lines of the file about ``event``."""
    encoder = _Encoder(event, with_tokens=options.rollout_tokens)
    members = kept_members(event.groups, options.rollouts)
    sizes: list[int] = []
    lines: list[bytes] = []
    total = 0
    for member in members:
        line = encoder.whole(member)
        sizes.append(len(line))
        total += len(line)
        if total <= options.rollout_bytes:
            lines.append(line)
    if total <= options.rollout_bytes:
        return lines
    room = options.rollout_bytes - _LAST_LINE
    fitting = room // _LEAST_LINE
    level = _level(sizes[:fitting], room)
    written: list[bytes] = []
    shorter = 0
    for member, size, known in zip(members[:fitting], sizes, [*lines, *[b""] * len(members)], strict=False):
        if size <= level:
            written.append(known or encoder.whole(member))
        elif line := encoder.within(member, level):
            written.append(line)
            shorter += 1
    missing = {
        "left_out": len(members) - len(written),
        "shortened": shorter,
        "bytes": total - sum(map(len, written)),
    }
    return [*written, orjson.dumps(missing, option=orjson.OPT_APPEND_NEWLINE)]


def _level(sizes: Sequence[int], room: int) -> int:
    """The size to which the larger ones must be cut so that the sum of all is at most ``room``."""
    left = len(sizes)
    for size in sorted(sizes):
        if size * left > room:
            return room // left
        room -= size
        left -= 1
    return max(sizes, default=0)


class _Encoder:
    """Encodes members of one batch, group by group."""

    def __init__(self, event: RolloutsFinished, *, with_tokens: bool) -> None:
        self._event = event
        self._with_tokens = with_tokens
        self._group: Group | None = None
        self._row = b""
        # Of ``_group``: encoded once for all of its members.
        self._paused = time.perf_counter()

    def whole(self, kept: KeptMember) -> bytes:
        """The line of a trajectory."""
        self._give_way()
        line = b"" if self._with_tokens else self._whole_at_once(kept)
        if line:
            return line
        tokens = self._tokens(kept.traj) if self._with_tokens else b""
        return _line(self._any(self._fields(kept)), self._encoded_row(kept.group), self._messages(kept.traj), tokens)

    def _whole_at_once(self, kept: KeptMember) -> bytes:
        """The same line in a fifth of the time, if there is little and nothing odd in it; else nothing."""
        messages = _said(kept.traj)
        if kept.traj.context_tokens > _SHORT_TOKENS or set(map(type, messages)) != {dict}:
            return b""
        line = self._fields(kept)
        line["row"], line["messages"] = orjson.Fragment(self._encoded_row(kept.group)), messages
        try:
            return orjson.dumps(line, option=_LINE_OPTIONS)
        except TypeError:
            return b""

    def within(self, kept: KeptMember, limit: int) -> bytes:
        """At most ``limit`` bytes of its line; nothing if that is too little."""
        head, row = self._any(self._fields(kept)), self._encoded_row(kept.group)
        rest = b',"shortened":true' + (b',"tokens":null,"logprobs":null' if self._with_tokens else b"")
        room = limit - len(_line(head, b"", [], rest))
        if room < 2 * _LEAST_MESSAGE:
            return b""
        if len(row) > room // 4:
            row = self._cut(row.decode(), room // 4)
        return _line(head, row, self._cut_messages(kept.traj, room - len(row)), rest)

    def _fields(self, kept: KeptMember) -> dict[str, Any]:
        """All but what can be long."""
        traj, event = kept.traj, self._event
        newest = None if event.evaluation else event.version
        return {
            "n": event.n,
            "evaluation": event.evaluation,
            "version": event.version,
            "group": traj.group,
            "member": traj.member,
            "attempt": traj.attempt,
            "id": traj.id,
            "best": kept.best,
            "worst": kept.worst,
            "reward": traj.reward,
            "metrics": traj.metrics,
            "truncated": traj.truncated,
            "dropped": traj.dropped,
            "error": None if traj.error is None else error_text(traj.error),
            "where": place_of(traj.error),
            "turns": traj.turns,
            "generated_tokens": traj.generated_tokens,
            "context_tokens": traj.context_tokens,
            "seconds": traj.seconds,
            "segments": [
                {
                    "version": span.version,
                    "age": None if newest is None or span.version is None else newest - span.version,
                    "tokens": len(span.tokens),
                }
                for span in traj.spans
                if span.kind is _GENERATED
            ],
        }

    def _encoded_row(self, group: Group) -> bytes:
        if group is not self._group:
            self._group = group
            try:
                self._row = self._any(self._spared(group.row, ()))
            except Exception as error:  # noqa: BLE001  see _any
                self._row = _refused(group.row, error)
        return self._row

    def _messages(self, traj: Trajectory) -> list[bytes]:
        return [self._message(message) for message in _said(traj)]

    def _message(self, message: object) -> bytes:
        if not isinstance(message, dict):
            message = {"role": "", "content": shown(message)}
        content = message.get("content")
        if type(content) is str and len(content) > _PIECE:
            message = message | {"content": orjson.Fragment(self._text(content))}
        return self._any(message)

    def _cut_messages(self, traj: Trajectory, room: int) -> list[bytes]:
        """The messages in at most ``room`` bytes: the longest are cut; if there are too many, the middle ones go."""
        messages = list(_said(traj))
        encoded = self._messages(traj)
        room -= len(encoded)  # commas
        sizes = list(map(len, encoded))
        level = _level(sizes, room)
        if level < min(_LEAST_MESSAGE, max(sizes, default=0)):
            ends = max(0, room // _LEAST_MESSAGE - 1) // 2
            after = len(messages) - ends
            mark = {"role": "", "content": f"[{after - ends} messages left out]"}
            messages[ends:after], encoded[ends:after] = [mark], [self._message(mark)]
            level = _level(list(map(len, encoded)), room)
        return [
            data if len(data) <= level else self._cut_message(message, data, level)
            for message, data in zip(messages, encoded, strict=True)
        ]

    def _cut_message(self, message: object, encoded: bytes, limit: int) -> bytes:
        """The message with the middle of its content left out; of one with long calls, the middle of its JSON."""
        others = {key: item for key, item in message.items() if key != "content"} if isinstance(message, dict) else {}
        content = message.get("content") if isinstance(message, dict) else ""
        if len(self._any(others)) > limit // 2:
            role = others.get("role")
            others = {"role": role[:_LONGEST_ROLE] if isinstance(role, str) else ""}
            content = encoded.decode()
        elif not isinstance(content, str):
            content = self._any(content).decode()
        room = limit - len(self._any({**others, "content": 0}))
        return self._any({**others, "content": orjson.Fragment(self._cut(content, room))})

    def _tokens(self, traj: Trajectory) -> bytes:
        """All ids, and the log-probability of each that was sampled; null for the others."""
        logprobs = np.full(traj.context_tokens, np.nan, dtype=np.float32)
        start = 0
        for span in traj.spans:
            stop = start + len(span.tokens)
            if span.logprobs is not None:
                logprobs[start:stop] = span.logprobs
            start = stop
        return b"".join((b',"tokens":', self._array(traj.tokens()), b',"logprobs":', self._array(logprobs)))

    def _array(self, array: npt.NDArray[Any]) -> bytes:
        pieces = [self._any(array[start : start + _PIECE])[1:-1] for start in range(0, len(array), _PIECE)]
        return b"".join((b"[", b",".join(pieces), b"]"))

    def _cut(self, value: str, room: int) -> bytes:
        """Text whose JSON has at most ``room`` bytes, which are about 60 at least, with a mark in its middle."""
        limit = room
        while True:
            encoded = self._text(shortened(value, limit))
            if len(encoded) <= room or not limit:
                return encoded
            limit = max(0, min(limit - 1, limit * room // len(encoded) - 40))

    def _text(self, value: str) -> bytes:
        valid = text(value)
        pieces = [self._any(valid[start : start + _PIECE])[1:-1] for start in range(0, len(valid), _PIECE)]
        return b"".join((b'"', *pieces, b'"'))

    def _spared(self, value: object, around: tuple[int, ...]) -> object:
        """``value`` in a form that is encoded in small pieces, without what nobody could read."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, str):
            return value if len(value) <= _PIECE else orjson.Fragment(self._text(value))
        if kind in (dict, list, tuple):
            return "(contains itself)" if id(value) in around else self._spared_parts(value, (*around, id(value)))
        size = getattr(value, "nbytes", 0)
        if isinstance(size, int) and size > _LARGEST_ARRAY_BYTES:
            return f"({kind.__name__} of shape {shown(getattr(value, 'shape', None))}, {size} bytes)"
        return value

    def _spared_parts(self, value: Any, inside: tuple[int, ...]) -> object:
        if isinstance(value, dict):
            return {key: self._spared(item, inside) for key, item in value.items()}
        some = value[:_LONGEST_LIST]
        left_out = [f"[{len(value) - len(some)} items left out]"] if len(value) > len(some) else []
        plain = _SCALARS.issuperset(map(type, some))
        return [*(some if plain else [self._spared(item, inside) for item in some]), *left_out]

    def _give_way(self) -> None:
        if time.perf_counter() - self._paused > _WORK_S:
            time.sleep(_PAUSE_S)
            self._paused = time.perf_counter()

    def _any(self, value: object) -> bytes:
        """Whatever it is, as JSON."""
        self._give_way()
        try:
            return dumps(value)
        except Exception as error:  # noqa: BLE001  objects of users raise whatever they like
            return _refused(value, error)


def _refused(value: object, error: Exception) -> bytes:
    return dumps(f"{shown(value)} cannot be written: {error_text(error)}")


def _said(traj: Trajectory) -> list[Any]:
    """The messages; an environment may have put anything in their place."""
    found: object = traj.messages
    return found if isinstance(found, list) else [found]


def _line(head: bytes, row: bytes, messages: Sequence[bytes], rest: bytes) -> bytes:
    return b"".join((head[:-1], b',"row":', row, b',"messages":[', b",".join(messages), b"]", rest, b"}\n"))
