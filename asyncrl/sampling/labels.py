"""Labels of weights: whose they are, and which version.

A version is a number of one run only: another run's 7 is another policy. A server keeps one text beside its weights and
says it about every token, so a label has both: ``1f0c2a9b.77d0e3c1:7`` is version 7 of the run ``1f0c2a9b``, written by
its process ``77d0e3c1``. A client believes what its own process has written and nothing else: also a run that is
resumed gives the servers its version anew. Adapters have no label but a name; their requests show that of the weights
below, which must stay what they were when the adapter was checked.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from dataclasses import dataclass, field

from asyncrl.errors import ProtocolError, WeightsOverwritten
from asyncrl.sampling.replies import shown

__all__ = ["ForeignWeights", "Labels", "Writer", "WrongWeights"]

_TAKEOVERS = 3
# How often one server may be found with the weights of somebody else, and be given ours again, before the run ends.
_LABEL = re.compile(r"([0-9a-f]{8})\.([0-9a-f]{8}):([0-9]{1,18})")
_NUMBER = re.compile(r"[0-9]{1,18}")
_UNNAMED = "default"
# What SGLang calls the weights that it was started with, unless it was told a name.


class WrongWeights(ProtocolError):
    """A sound reply by weights that were not asked for, as of a server that was started anew: another may do better."""


class ForeignWeights(WrongWeights):
    """Weights that somebody else has written to the server."""


def _name() -> str:
    return uuid.uuid4().hex[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A process of a run."""

    run: str = field(default_factory=_name)
    """Eight hexadecimal digits; the same when a run is resumed."""
    process: str = field(default_factory=_name)
    """The like, and never the same."""

    def label(self, version: int) -> str:
        """What a server is told about the weights of ``version``."""
        return f"{self.run}.{self.process}:{version}"


class Labels:
    """Owns what a client believes about weights. Without a writer labels are plain numbers, whoever wrote them."""

    def __init__(self) -> None:
        self.writer: Writer | None = None
        self.newest = -1
        """The newest version that was given to a server."""
        self.overwritten: WeightsOverwritten | None = None
        """Why the run cannot go on: somebody else keeps writing to its servers."""
        self.last_foreign = ""
        """What was found last of somebody else, and where."""
        self._known = {_UNNAMED}
        self._below: dict[str, str] = {}
        self._holds: Counter[str] = Counter()
        self._takeovers: Counter[str] = Counter()
        self._counted: dict[str, int] = {}
        # At which count of holds the newest takeover of each server was found.

    def claim(self, writer: Writer | None) -> None:
        """The servers are ``writer``'s from now on. It has given them nothing yet."""
        self.writer, self.newest, self.overwritten = writer, -1, None
        for by_server in (self._below, self._holds, self._takeovers, self._counted):
            by_server.clear()

    def found(self, label: str) -> None:
        """A server came with ``label``: it may have it again after it was started anew."""
        if not _LABEL.fullmatch(label):
            self._known.add(label)

    def give(self, version: int) -> str:
        """The label of ``version``, which servers get from now on."""
        self.newest = max(self.newest, version)
        return str(version) if self.writer is None else self.writer.label(version)

    def version(self, label: object) -> int:
        """The version that ``label`` says. Raises ``WrongWeights`` unless it is one that we have given to servers."""
        if isinstance(label, str):
            if self.writer is None:
                if _NUMBER.fullmatch(label):
                    return int(label)
            else:
                owner, _, number = label.partition(":")
                if owner == f"{self.writer.run}.{self.writer.process}" and _NUMBER.fullmatch(number):
                    version = int(number)
                    if version <= self.newest:
                        return version
        raise self._wrong(label)

    def hold(self, url: str, label: str) -> None:
        """``url`` holds what it should, and its base weights have ``label``."""
        self._below[url] = label
        self._holds[url] += 1

    def holds(self, url: str) -> int:
        """How often ``url`` was given what it should hold; without a name all servers, as behind a router."""
        return self._holds[url] if url else self._holds.total()

    def require_below(self, label: object) -> None:
        """``label`` is that of the weights below an adapter; ``WrongWeights`` if no server had it when checked."""
        if label is not None and self._below and label not in self._below.values():
            error = self._wrong(label)
            raise type(error)(f"its adapter is on {error}") from error

    def verify(self, url: str, label: str, given: str) -> None:
        """``url`` says ``label`` after it was given ``given``. Raises ``WrongWeights`` if that differs."""
        if label == given:
            self.hold(url, given)
            return
        error = self._wrong(label)
        self.report(url, error, since=self.holds(url))
        raise type(error)(f"after an update to {given!r} {url} has {error}") from error

    def report(self, url: str, error: WrongWeights, *, since: int) -> None:
        """A request has shown that ``url`` had wrong weights; at its departure ``holds(url)`` was ``since``.

        Raises ``WeightsOverwritten`` if somebody else has written there too often. A server is taken over once until it
        is given ours again; what was under way at that time says nothing new.
        """
        holds = self.holds(url)
        if isinstance(error, ForeignWeights):
            self.last_foreign = f"{url or 'a server'} had {error}"
        if not isinstance(error, ForeignWeights) or since != holds or self._counted.get(url) == holds:
            return
        self._counted[url] = holds
        self._takeovers[url] += 1
        if self._takeovers[url] >= _TAKEOVERS:
            self.overwritten = WeightsOverwritten(
                f"somebody else keeps writing weights to {url or 'the servers'}: {error}; found {_TAKEOVERS} times, "
                "each time after it was given ours again. Give each run servers of its own, or train LoRA adapters, "
                "which can share servers"
            )
            raise self.overwritten

    def require_ours(self) -> None:
        """Raise ``WeightsOverwritten`` if that was found."""
        if self.overwritten is not None:
            raise self.overwritten

    def _wrong(self, label: object) -> WrongWeights:
        found = shown(label)
        if self.writer is None:
            return WrongWeights(f"weights {found}, which are no version of ours")
        us = f"this run is {self.writer.run}" + (f" at {self.newest}" if self.newest >= 0 else "")
        if not isinstance(label, str) or label in self._known:
            return WrongWeights(f"weights {found}, which are no version of ours: {us}")
        parsed = _LABEL.fullmatch(label)
        if parsed is None:
            return ForeignWeights(f"weights {found}, which somebody else has named; {us}")
        run, process, version = parsed.groups()
        if run != self.writer.run:
            return ForeignWeights(f"weights of run {run}, version {version}; {us}")
        if process != self.writer.process:
            return ForeignWeights(f"weights of version {version} by another process of this run; {us}")
        return WrongWeights(f"weights of version {version}, which was not made yet; {us}")
