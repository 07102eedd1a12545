"""Seeds of a run's random choices, each a hash of what it is for.

A sum of such numbers would not do: run 1 would draw for member 0 what run 0 draws for member 1. A hash shares nothing,
and is the same in every process, so that a resumed run goes on with the same seeds.
"""

from __future__ import annotations

from hashlib import blake2b, blake2s
from struct import pack

__all__ = ["derived", "derived_for_request"]


def derived(*parts: int | str) -> int:
    """A seed from 0 to 2**31 - 1, which servers and numpy take. Example: ``derived(run_seed, group, member)``."""
    digest = blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF


def derived_for_request(seed: int, group: int, member: int, attempt: int, segment: int) -> int:
    """The seed of one sampling request, of a trajectory with ``seed``. Takes half as long as ``derived``, for it is
    asked for each segment.
    """
    digest = blake2s(pack("<5q", seed, group, member, attempt, segment), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF
