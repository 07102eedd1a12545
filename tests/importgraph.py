"""The import graph of the package: rooms, floors, arrows and circles.

A room is a module or a package at the top level. It stands one floor above the highest room that it imports; imports in
functions and for type checkers count like all others.

    python tests/importgraph.py [ROOT]

prints the floors, from the ground up, and the figures. ROOT is the package's folder.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

__all__ = ["LAZY", "Graph", "imported", "read"]

_SHIM = "cpu_shim"
# A package for SGLang's interpreter, on whose path it is put.
LAZY = frozenset({("sampling.sglang", "servers")})
"""Module and room: servers that a client starts are imported when they are wanted, which does not count."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of all modules that are imported anywhere in ``tree``; ``from a import b`` is ``a.b``, for b may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@dataclass(frozen=True)
class Graph:
    """``arrows``: room -> the rooms that it imports, and the modules of it that do."""

    arrows: Mapping[str, Mapping[str, frozenset[str]]]
    lines: int

    @property
    def rooms(self) -> frozenset[str]:
        """All rooms."""
        return frozenset(self.arrows)

    @cached_property
    def circle(self) -> tuple[str, ...]:
        """Rooms that import each other in a circle; empty without one."""
        try:
            TopologicalSorter(self.arrows).prepare()
        except CycleError as error:
            return tuple(error.args[1])
        return ()

    @cached_property
    def floors(self) -> list[list[str]]:
        """The rooms of each floor, from the ground up. There must be no circle."""
        floor: dict[str, int] = {}
        for room in TopologicalSorter(self.arrows).static_order():
            floor[room] = 1 + max((floor[below] for below in self.arrows[room]), default=-1)
        return [sorted(room for room in floor if floor[room] == number) for number in range(max(floor.values()) + 1)]


def read(root: Path, *, without: frozenset[tuple[str, str]] = LAZY) -> Graph:
    """The graph of the package in ``root``; ``without``: arrows that do not count, from a module to a room."""
    files = [file for file in sorted(root.rglob("*.py")) if _SHIM not in file.parts]
    rooms = {file.relative_to(root).parts[0].removesuffix(".py") for file in files} - {"__init__"}
    arrows: dict[str, dict[str, set[str]]] = {room: {} for room in sorted(rooms)}
    for file in files:
        inside = ".".join(file.relative_to(root).with_suffix("").parts)
        room = inside.partition(".")[0]
        for name in imported(ast.parse(file.read_text(encoding="utf-8"))):
            package, _, rest = name.partition(".")
            below = rest.partition(".")[0]
            if package == root.name and room in rooms and below in rooms - {room} and (inside, below) not in without:
                arrows[room].setdefault(below, set()).add(inside)
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
    return Graph({room: {to: frozenset(by) for to, by in found.items()} for room, found in arrows.items()}, lines)


def main() -> None:
    """Print the graph of the package, or of another one."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "asyncrl").resolve()
    graph = read(root)
    up = [f"{module} -> {room}" for module, room in sorted(LAZY)]
    if not graph.circle:
        for number, rooms in enumerate(graph.floors, start=1):
            print(f"{number:2}  {' '.join(rooms)}")
    floors = "-" if graph.circle else len(graph.floors)
    circle = " > ".join(graph.circle) or "none"
    print(f"rooms {len(graph.rooms)}, floors {floors}, circle {circle}, lines {graph.lines}")
    print(f"not counted: {', '.join(up)}")


if __name__ == "__main__":
    main()
