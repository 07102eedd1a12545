"""Lines for a person: with colours and hanging indents on a terminal, as they are in pipes and files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

__all__ = ["Page"]

_PLAIN_WIDTH = 100
_INDENT = re.compile(r" *(?:- )?")


class Page:
    """Prints to ``stream``. ``width`` is that of the terminal, or what is comfortable to read."""

    def __init__(self, stream: TextIO, *, width: int | None = None) -> None:
        self._stream = stream
        self._console = Console(file=stream, width=width, markup=False, highlight=False, emoji=False)
        self.width = self._console.width if self._console.is_terminal else width or _PLAIN_WIDTH

    def show(self, lines: Iterable[Text]) -> None:
        """Print ``lines``. On a terminal what is too long goes on in the next line, below its beginning."""
        if not self._console.is_terminal:
            self._stream.write("".join(f"{line.plain}\n" for line in lines))
            return
        for line in lines:
            self._wrap(line)

    def _wrap(self, line: Text) -> None:
        indent = cast(re.Match[str], _INDENT.match(line.plain)).end()
        if indent > self.width // 2 or len(line) <= self.width:
            self._console.print(line, soft_wrap=len(line) <= self.width)
            return
        for place, part in enumerate(line[indent:].wrap(self._console, self.width - indent)):
            self._console.print(Text.assemble(line[:indent] if not place else " " * indent, part), soft_wrap=True)
