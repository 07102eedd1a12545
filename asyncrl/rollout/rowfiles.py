"""Rows from files: JSON lines, JSON, CSV, TSV, Parquet, and folders of the library ``datasets``.

It promises rows that are dicts with text as keys, at least one, or a ``ConfigError`` that names file, line and what is
wrong there: nothing is guessed, skipped or repaired but for empty lines and a byte order mark. CSV has no types, so all
its values are text. Blocking, and the whole file is read into memory.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Never

from asyncrl.errors import ConfigError
from asyncrl.plain import shown
from asyncrl.types import Row

__all__ = ["ROW_FILES", "load_rows"]


def load_rows(path: str | Path) -> list[Row]:
    """The rows of a file, by the ending of its name, or of a folder that ``datasets.save_to_disk`` wrote.

    ``.jsonl`` and ``.ndjson``: one JSON object a line. ``.json``: a list of objects. ``.csv`` and ``.tsv``: the first
    line names the columns, all values are text. ``.parquet``: needs pyarrow. Text is UTF-8. ``~`` is the home folder.

    >>> load_rows("sums.jsonl")  # doctest: +SKIP
    [{'a': 1, 'b': 2}, {'a': 3, 'b': 4}]

    Blocking. Raises ``ConfigError``.
    """
    file = Path(path).expanduser()
    read = _folder if file.is_dir() else ROW_FILES.get(file.suffix.lower())
    if read is None:
        raise ConfigError(f"{file} has rows in a format that is not known: its name must end with {_ENDINGS}")
    try:
        rows = read(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise ConfigError(f"{file}: has no rows, but must have at least one")
    return rows


def _json_lines(file: Path) -> list[Row]:
    text = _text(file)
    if text.startswith("["):
        _wrong(file, 1, "starts a JSON list, but must be one JSON object: a file with a list is named .json")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_object(_parsed(line, file, number), file, f"line {number}"))
    return rows


def _json(file: Path) -> list[Row]:
    found = _parsed(_text(file), file, 1)
    if isinstance(found, Mapping):
        raise ConfigError(f"{file}: is one JSON object, but must be a list of them; one object a line is named .jsonl")
    if not isinstance(found, list):
        raise ConfigError(f"{file}: is {shown(found)}, but must be a list of JSON objects")
    return [_object(row, file, f"item {index}") for index, row in enumerate(found)]


def _object(row: object, file: Path, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f'{file}: {where} is {shown(row)}, but a row must be a JSON object such as {{"a": 1}}')
    return row


def _parsed(text: str, file: Path, first_line: int) -> object:
    """``text``, which begins in line ``first_line``, as JSON: strictly, so without NaN and names that come twice."""
    try:
        return json.loads(text, object_pairs_hook=_pairs, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        _wrong(file, line, f"is not JSON: {error.msg} (column {error.colno}){_hint(text, error.pos)}")
    except RecursionError:
        _wrong(file, first_line, "is nested too deeply")
    except ValueError as error:  # our own, or an integer of thousands of digits
        _wrong(file, first_line, f"cannot be used: {error}")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the name {shown(twice)} twice")
    return found


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON: write null, or leave the value out")


def _hint(text: str, place: int) -> str:
    """For the mistakes that people make."""
    before, after = text[:place].rstrip(), text[place:].lstrip()
    if after.startswith("'"):
        return ": JSON has double quotes"
    if after.startswith(",") or (before.endswith(",") and after.startswith(("]", "}"))):
        return ": there is a comma too many"
    return ""


def _csv(file: Path) -> list[Row]:
    return _separated(file, ",")


def _tsv(file: Path) -> list[Row]:
    return _separated(file, "\t")


def _separated(file: Path, separator: str) -> list[Row]:
    lines = csv.reader(io.StringIO(_text(file), newline=""), delimiter=separator, strict=True)
    columns: list[str] | None = None
    rows: list[Row] = []
    first = 1  # of the row: one whose text has line ends is several lines
    try:
        for cells in lines:
            if columns is None:
                columns = _columns(cells, file, first, separator) if cells else None
            elif cells and len(cells) != len(columns):
                _wrong(file, first, f"has {len(cells)} values, but the first line names {len(columns)} columns")
            elif cells:
                rows.append(dict(zip(columns, cells, strict=True)))
            first = lines.line_num + 1
    except csv.Error as error:
        _wrong(file, first, f"cannot be read: {error}")
    return rows


def _columns(names: list[str], file: Path, line: int, separator: str) -> list[str]:
    names = [name.strip() for name in names]
    if "" in names:
        _wrong(file, line, f"must name every column, but number {names.index('') + 1} has no name")
    if twice := [name for name in names if names.count(name) > 1]:
        _wrong(file, line, f"names the column {shown(twice[0])} twice")
    if len(names) == 1 and any(sign in names[0] for sign in ";\t,"):
        _wrong(file, line, f"names one column, {shown(names[0])}: columns must be separated by {separator!r}")
    return names


def _text(file: Path) -> str:
    data = file.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{file}: is UTF-16, but must be UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        _wrong(file, line, f"is not UTF-8: it has the byte 0x{data[error.start]:02x}")


def _parquet(file: Path) -> list[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{file}: Parquet is read by pyarrow, which is not installed: pip install pyarrow") from error
    if not file.is_file():
        raise FileNotFoundError(2, "No such file or directory")
    try:
        rows: list[Row] = parquet.read_table(file).to_pylist()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file}: is no Parquet file that can be read: {error}") from error
    return rows


def _folder(folder: Path) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{folder}: a folder is read by the library datasets, which is not installed: pip install datasets"
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder}: is no folder that datasets.save_to_disk wrote: {error}") from error
    if isinstance(found, Mapping):
        splits = ", ".join(str(folder / name) for name in found)
        raise ConfigError(f"{folder}: has several splits, but must be one of them: {splits}")
    return list(found)


def _wrong(file: Path, line: int, what: str) -> Never:
    raise ConfigError(f"{file}: line {line} {what}")


ROW_FILES: Mapping[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
    ".parquet": _parquet,
}
"""The endings of names, and how such files are read."""
_ENDINGS = ", ".join(ROW_FILES)
