"""What travels between a driver and its ranks: frames of a JSON header and a safetensors payload, nothing pickled.

A frame is a prefix of 16 bytes (a mark, the length of the header, the length of the payload; big-endian), the header
and the payload. Who reads says how long either may be, so that a stranger's first bytes cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from safetensors import SafetensorError
from safetensors.numpy import load, save

from asyncrl.errors import LearnerError

__all__ = ["MOST_BYTES", "PREFIX_BYTES", "Arrays", "Frame", "FrameError", "lengths", "read_frame"]

Arrays = Mapping[str, npt.NDArray[Any]]
_MARK = b"ARL1"
_PREFIX = struct.Struct("!4sIQ")
PREFIX_BYTES = _PREFIX.size
MOST_BYTES = 1 << 40
"""Of a frame from somebody who has shown the token. It only keeps a damaged length from being believed."""


class FrameError(LearnerError):
    """What came is no frame; nothing that follows it can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message. ``header`` is plain JSON; the payload is arrays, or a tensor's bytes, in safetensors' format."""

    header: Mapping[str, Any]
    payload: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Arrays) -> Frame:
        """With ``arrays`` as payload."""
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        return cls(header=header, payload=save(whole) if whole else b"")

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of the payload. Raises ``FrameError`` if it is none."""
        try:
            return load(self.payload) if self.payload else {}
        except (SafetensorError, ValueError, KeyError) as error:
            raise FrameError(f"a message between driver and ranks has no readable payload: {error}") from error

    def encoded(self) -> bytes:
        """The whole frame. Raises ``TypeError`` if the header is no JSON."""
        header = orjson.dumps(self.header)
        return b"".join((_PREFIX.pack(_MARK, len(header), len(self.payload)), header, self.payload))

    @classmethod
    def decoded(cls, header: bytes, payload: bytes) -> Frame:
        """From its two parts. Raises ``FrameError`` if the header is no JSON object."""
        try:
            parsed = orjson.loads(header)
        except orjson.JSONDecodeError as error:
            raise FrameError(f"a message between driver and ranks has no JSON header: {error}") from error
        if not isinstance(parsed, dict):
            raise FrameError(f"a message between driver and ranks begins with {header[:80]!r}, which is no object")
        return cls(header=parsed, payload=payload)


def lengths(prefix: bytes, *, most_bytes: int = MOST_BYTES) -> tuple[int, int]:
    """Bytes of header and payload. Raises ``FrameError`` for another protocol, and for more than ``most_bytes``."""
    mark, header, payload = _PREFIX.unpack(prefix)
    if mark != _MARK:
        raise FrameError(f"who is on the other side speaks another protocol: it began with {prefix!r}")
    if header + payload > most_bytes:
        raise FrameError(f"a message of {header + payload} bytes came where at most {most_bytes} are allowed")
    return header, payload


def read_frame(receive: Callable[[int], bytes], *, most_bytes: int = MOST_BYTES) -> Frame:
    """The next frame; ``receive`` gives exactly so many bytes, blocking, or raises."""
    header, payload = lengths(receive(PREFIX_BYTES), most_bytes=most_bytes)
    return Frame.decoded(receive(header), receive(payload))
