"""Reading the labels of weights."""

from __future__ import annotations

from asyncrl.testing.server import ScriptedServer

__all__ = ["version_of"]


def version_of(labelled: ScriptedServer | str) -> int:
    """The version in a label, or in that of a server's weights."""
    label = labelled if isinstance(labelled, str) else labelled.weight_version
    return int(label.rpartition(":")[2])
