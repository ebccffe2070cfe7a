"""Files of rows: JSON lines, JSON, CSV and parquet; some fields of each, few rows at a time."""

import csv
import functools
import io
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from train import checks
from train.data import files as on_disk

_MOST = checks.MOST_TEXT  # bytes of a row
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()

Columns = dict[str, str]
"""Names of fields by the settings that give them: "column", and perhaps "tools"."""

# A file and columns -> their values in each row, with the row's share of the file in bytes.
Rows = Callable[[pathlib.Path, Columns], Iterator[tuple[list[Any], int]]]


def without_nulls(value: Any) -> Any:
    """A value of a table without keys that are null: a row of JSON would not have them.

    A column of structs has the keys of all its rows; those that a row lacks are null in it.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _fields(row: Any, where: str, columns: Columns) -> list[Any]:
    column, *others = columns.values()
    if not isinstance(row, dict):
        raise ValueError(f'{where} holds {row!r:.80}; needs an object, as {{"{column}": "..."}}.')
    if column not in row:
        raise ValueError(
            f"{where} has no field data.column={column!r}; write one of {sorted(row)!s:.200}."
        )
    return [row[column], *map(row.get, others)]


def require_columns(names: list[str], columns: Columns, where: str) -> None:
    """Raises a ValueError if a table lacks a column, or has several of its name."""
    for setting, name in columns.items():
        if names.count(name) != 1:
            raise ValueError(
                f"data.{setting}={name!r} is not one column of {where}; write one of "
                f"{names!s:.200}."
            )


def _lines(file: pathlib.Path, columns: Columns) -> Iterator[tuple[list[Any], int]]:
    """Reads an object from each line."""
    with on_disk.opened(file) as opened:
        for number, line in enumerate(_short(opened, b"", file), 1):
            if line.strip():
                where = f"line {number} of {str(file)!r}"
                try:
                    row = json.loads(line.decode("utf-8-sig"))  # of bytes json guesses
                except UnicodeDecodeError as error:
                    raise ValueError(f"{where} is not UTF-8 text; convert the file.") from error
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where} is not JSON ({error}); fix or remove it.") from error
                yield _fields(row, where, columns), len(line)


def _short(opened, end, file: pathlib.Path) -> Iterator:
    """The lines of a file, which must not be as long as to fill memory."""
    for number, line in enumerate(iter(lambda: opened.readline(_MOST), end), 1):
        if len(line) == _MOST:
            raise ValueError(
                f"line {number} of {str(file)!r} has {_MOST} characters or more; needs shorter "
                "rows, each on a line."
            )
        yield line


def _json(file: pathlib.Path, columns: Columns) -> Iterator[tuple[list[Any], int]]:
    """Reads an array of objects, or objects that follow each other."""
    for number, (row, size) in enumerate(_objects(file), 1):
        yield _fields(row, f"row {number} of {str(file)!r}", columns), size


def _objects(file: pathlib.Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of a file, and the characters of each; about a mebibyte is in memory."""
    pieces = on_disk.pieces(file)
    text = next(pieces).lstrip()
    at = int(is_array := text.startswith("["))
    for number in itertools.count(1):
        while True:
            at = _SPACE.match(text, at).end()
            if is_array and text.startswith("]", at):
                if text[at + 1 :].strip() or any(piece.strip() for piece in pieces):
                    raise ValueError(f"{str(file)!r} goes on after its array; cut it off.")
                return
            try:
                row, end = _decoded(text, at, is_array and number > 1)
                break
            except ValueError as error:  # an object may go on in the next piece
                longer = text[at:] + _next(pieces, len(text) - at)
                if not longer and not is_array:
                    return
                if len(longer) == len(text) - at or len(longer) > 2 * _MOST:
                    raise ValueError(
                        f"row {number} of {str(file)!r} is not JSON "
                        f"({getattr(error, 'msg', error)}); needs an array of objects, or an "
                        "object on each line."
                    ) from error
                text, at = longer, 0
        yield row, end - at
        at = end


def _next(pieces: Iterator[str], least: int) -> str:
    """At least so many characters if there are: twice as many each time are read few times."""
    found = []
    while sum(map(len, found)) <= least and (piece := next(pieces, "")):
        found.append(piece)
    return "".join(found)


def _decoded(text: str, at: int, comma: bool) -> tuple[dict[str, Any], int]:
    if comma:
        if not text.startswith(",", at):
            raise ValueError("it lacks ',' or ']'")
        at = _SPACE.match(text, at + 1).end()
    if not text.startswith("{", at):
        raise ValueError(f"it begins with {text[at : at + 10]!r}")
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _csv(
    file: pathlib.Path, columns: Columns, delimiter: str = ","
) -> Iterator[tuple[list[Any], int]]:
    """Reads a table whose first row names the columns."""
    csv.field_size_limit(_MOST)  # of this process; Python's own limit is 128 KiB
    with on_disk.opened(file) as opened, io.TextIOWrapper(opened, "utf-8-sig", newline="") as text:
        rows = csv.reader(_short(text, "", file), delimiter=delimiter, strict=True)
        try:
            names = next(rows, [])
            require_columns(names, columns, repr(str(file)))
            places, before = [names.index(name) for name in columns.values()], 0
            for row in rows:
                if not row:  # a blank line
                    continue
                if len(row) != len(names):
                    raise ValueError(
                        f"line {rows.line_num} of {str(file)!r} has {len(row)} fields, but the "
                        f"first row names {len(names)}; fix or remove it."
                    )
                after = opened.tell()
                yield [row[place] for place in places], after - before
                before = after
        except csv.Error as error:
            raise ValueError(
                f"line {rows.line_num} of {str(file)!r} is not CSV ({error}); fix or remove it."
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{str(file)!r} is not UTF-8 text (after line {rows.line_num}); convert it."
            ) from error


def _parquet(file: pathlib.Path, columns: Columns) -> Iterator[tuple[list[Any], int]]:
    checks.require_package(repr(str(file)), "pyarrow", extra="huggingface")
    import pyarrow
    import pyarrow.parquet

    size = on_disk.stat(file).st_size
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            require_columns(opened.schema_arrow.names, columns, repr(str(file)))
            each = size // max(1, opened.metadata.num_rows)
            names = [*columns.values()]
            for batch in opened.iter_batches(batch_size=256, columns=names):
                for values in zip(*map(batch.column, names), strict=True):
                    yield [without_nulls(value.as_py()) for value in values], each
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{str(file)!r} cannot be read as parquet: {error}") from error


KINDS: dict[str, Rows] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": functools.partial(_csv, delimiter="\t"),
    ".parquet": _parquet,
}
"""Readers by the end of a file's name, in small letters."""
