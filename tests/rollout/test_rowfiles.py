"""Rows from files: what is read, and what is said about files that people have."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.servers.machine import has_module

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(TEXT, VALUES, max_size=4), min_size=1, max_size=5)
COLUMNS = st.lists(
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5), min_size=1, max_size=4, unique=True
)
OFTEN = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The place of a file without its ending."""
    return tmp_path / "rows"


@OFTEN
@given(rows=ROWS, mark=st.booleans(), end=st.sampled_from(["\n", "\r\n", "\n\n", "\n  \n"]), ascii_only=st.booleans())
def test_json_is_read_as_it_was_written(file: Path, rows: list[Any], mark: bool, end: str, ascii_only: bool) -> None:
    """One object a line, and a list of them: with a byte order mark, with empty lines, with any text."""
    start = "\ufeff" if mark else ""
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    file.with_suffix(".jsonl").write_bytes((start + end.join(lines) + end).encode())
    file.with_suffix(".json").write_bytes((start + json.dumps(rows, indent=1)).encode())
    assert rl.load_rows(file.with_suffix(".jsonl")) == rows
    assert rl.load_rows(str(file.with_suffix(".json"))) == rows


@OFTEN
@given(columns=COLUMNS, count=st.integers(1, 4), data=st.data(), suffix=st.sampled_from([".csv", ".TSV"]))
def test_separated_values_are_text_by_the_names_of_the_first_line(
    file: Path, columns: list[str], count: int, data: st.DataObject, suffix: str
) -> None:
    """Quoted as Python's csv quotes them: also values with line ends, quotes and separators."""
    cells = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n"), max_size=6)
    rows = [{name: data.draw(cells) for name in columns} for _ in range(count)]
    buffer = io.StringIO(newline="")
    delimiter = "," if suffix == ".csv" else "\t"
    writer = csv.DictWriter(buffer, columns, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    path = file.with_suffix(suffix)
    path.write_bytes(buffer.getvalue().encode())
    assert rl.load_rows(path) == rows


WRONG: dict[str, list[tuple[bytes, str]]] = {
    ".jsonl": [
        (b"", "has no rows"),
        (b"\n\n", "has no rows"),
        (b'{"a": 1}\n{"a": }\n', "line 2 is not JSON: Expecting value (column 7)"),
        (b'{"a": 1}\n\n{"a": 1,}\n', "line 3 is not JSON: "),
        (b'{"a": 1,}\n', "there is a comma too many"),
        (b'{"a": 1},\n{"a": 2}\n', "line 1 is not JSON: Extra data (column 9): there is a comma too many"),
        (b"{'a': 1}\n", "JSON has double quotes"),
        (b'[{"a": 1},\n{"a": 2}]', "a file with a list is named .json"),
        (b'{"a": NaN}\n', "line 1 cannot be used: NaN is not JSON"),
        (b'{"a": -Infinity}\n', "-Infinity is not JSON"),
        (b'{"a": 1}\n{"a": 1, "b": {"c": 2, "c": 3}}\n', "line 2 cannot be used: an object has the name 'c' twice"),
        (b'{"a": 1}\n[1, 2]\n', "line 2 is [1, 2], but a row must be a JSON object"),
        (b'"text"\n', "line 1 is 'text', but a row must be"),
        (b'{"a": 1}\n{"a": "caf\xe9"}\n', "line 2 is not UTF-8: it has the byte 0xe9"),
        ('{"a": 1}\n'.encode("utf-16"), "is UTF-16, but must be UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", "line 1 cannot be used: "),
        (b"[" * 100_000, "a file with a list is named .json"),
        (b'{"a":' * 100_000, "line 1 "),
        (b"\x1f\x8b\x08\x00", "is not UTF-8"),
    ],
    ".json": [
        (b"", "line 1 is not JSON: Expecting value"),
        (b"[]", "has no rows"),
        (b'{"a": 1}', "must be a list of them; one object a line is named .jsonl"),
        (b'{"a": 1}\n{"a": 2}\n', "line 2 is not JSON: Extra data"),
        (b'[{"a": 1},\n {"a": 2},\n]', "there is a comma too many"),
        (b'[{"a": 1}, 7]', "item 1 is 7, but a row must be"),
        (b"7", "is 7, but must be a list of JSON objects"),
        (b"[" * 100_000, "line 1 "),
    ],
    ".csv": [
        (b"", "has no rows"),
        (b"a,b\n", "has no rows"),
        (b"a,b\n1,2\n3\n", "line 3 has 1 values, but the first line names 2 columns"),
        (b'a,b\n"1\n1",2\n3,4,5\n', "line 4 has 3 values"),
        (b"a,a\n1,2\n", "line 1 names the column 'a' twice"),
        (b"a,\n1,2\n", "must name every column, but number 2 has no name"),
        (b"a;b\n1;2\n", "names one column, 'a;b': columns must be separated by ','"),
        (b'a,b\n1,"2\n', "line 2 cannot be read: unexpected end of data"),
        (b'a,b\n1,"2"3\n', "line 2 cannot be read: "),
        (b"a,b\n1,\xff\n", "line 2 is not UTF-8"),
        (b"a\n" + b"x" * 200_000 + b"\n", "line 2 cannot be read: field larger than field limit"),
    ],
    ".tsv": [(b"a,b\n1,2\n", "columns must be separated by '\\t'")],
    ".txt": [(b"a\n", "must end with .jsonl, .ndjson, .json, .csv, .tsv, .parquet")],
    "": [(b"a\n", "its name must end with")],
}


@pytest.mark.parametrize(
    ("suffix", "content", "message"), [(suffix, *case) for suffix, cases in WRONG.items() for case in cases]
)
def test_what_is_wrong_is_said_with_file_and_line(file: Path, suffix: str, content: bytes, message: str) -> None:
    """In one line that is not longer for a longer file."""
    path = file.with_suffix(suffix)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        rl.load_rows(path)
    said = str(raised.value)
    assert said.startswith(str(path))
    assert message in said
    assert len(said) < 400 + len(str(path))


@OFTEN
@given(content=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv"]))
def test_any_bytes_are_rows_or_refused(file: Path, content: bytes, suffix: str) -> None:
    """Nothing else is raised."""
    path = file.with_suffix(suffix)
    path.write_bytes(content)
    try:
        assert all(isinstance(row, dict) for row in rl.load_rows(path))
    except ConfigError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
def test_a_file_that_is_not_there_is_named(file: Path, suffix: str) -> None:
    """With the whole path."""
    path = file.with_suffix(suffix)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read: No such file")):
        rl.load_rows(path)


def test_the_home_folder_can_be_written_as_people_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde stands for it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}')
    assert rl.load_rows("~/rows.jsonl") == [{"a": 1}]


@pytest.mark.skipif(has_module("pyarrow") or has_module("datasets"), reason="only without these libraries")
def test_libraries_that_are_missing_are_named(file: Path) -> None:
    """With the command that installs them."""
    file.with_suffix(".parquet").touch()
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        rl.load_rows(file.with_suffix(".parquet"))
    with pytest.raises(ConfigError, match="pip install datasets"):
        rl.load_rows(file.parent)


def test_parquet_is_rows(file: Path) -> None:
    """Types are kept, and missing values are None; another file is refused."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"a": 1, "b": "x", "c": [1.5]}, {"a": None, "b": "y", "c": []}]
    path = file.with_suffix(".parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    assert rl.load_rows(path) == rows
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="is no Parquet file that can be read"):
        rl.load_rows(path)
    with pytest.raises(ConfigError, match="No such file"):
        rl.load_rows(file.with_name("absent.parquet"))


def test_a_folder_of_datasets_is_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split of it; several are named, and another folder is refused. The library is a fake of its one function."""
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    saved: dict[str, Any] = {"one": rows, "all": {"train": rows, "test": rows}}

    def load(folder: str) -> Any:
        try:
            return saved[Path(folder).name]
        except KeyError:
            raise FileNotFoundError(f"Directory {folder} is neither a Dataset directory nor a DatasetDict") from None

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=load))
    for name in ("one", "all", "other"):
        (tmp_path / name).mkdir()
    assert rl.load_rows(tmp_path / "one") == rows
    with pytest.raises(ConfigError, match=r"has several splits, but must be one of them: .*all/train"):
        rl.load_rows(tmp_path / "all")
    with pytest.raises(ConfigError, match=r"is no folder that datasets\.save_to_disk wrote: Directory"):
        rl.load_rows(tmp_path / "other")
