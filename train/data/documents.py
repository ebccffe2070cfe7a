"""Iterates over a corpus's documents: text files, and rows of JSONL, parquet or Hugging Face sets.

About one row, or one mebibyte of a file, is in memory at a time.
"""

import hashlib
import importlib.util
import json
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from train.data import files as on_disk
from train.data.sources import Data

_STDLIB_LEAVES_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo")
)


class Document(NamedTuple):
    """One text, or one chat.

    Attributes:
      name: Decides whether it is held out: the file's name, or the sha256 of a row.
      where: The file, or the row, for messages.
      size: Bytes.
      is_chat: Whether its text is JSON, the messages of a chat.
      pieces: Its text in pieces, one in memory at a time, each with the amount read of the total.
    """

    name: str
    where: str
    size: int
    is_chat: bool
    pieces: Iterator[tuple[str, int]]


class Source(NamedTuple):
    """A source of documents.

    Attributes:
      name: For the record.
      fingerprint: Changes if a file changes; from names, sizes and times.
      total: Amount to read, in bytes or rows.
      documents: () -> an iterator over them.
    """

    name: str
    fingerprint: str
    total: int
    documents: Callable[[], Iterator[Document]]


def find(data: Data) -> Source:
    """Finds the source that a configuration names; reads nothing yet.

    Raises:
      ValueError: If something is missing or cannot be listed; while reading, if it is not text.
    """
    if data.huggingface is not None:
        return _rows_of_a_set(data, data.huggingface)
    if data.path is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        return _files("python standard library", root, _standard_library(root), data)
    root = pathlib.Path(data.path)
    if not root.exists():
        raise ValueError(f"data.path={data.path!r} does not exist; name a text file or a folder.")
    if any((root / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _rows_of_a_set(data, data.path)
    if root.is_file():
        return _files(data.path, root.parent, [root], data)
    return _files(data.path, root, on_disk.files_below(root), data)


def _standard_library(root: pathlib.Path) -> list[pathlib.Path]:
    # _sysconfigdata describes how this machine's Python was built; it is not part of the library.
    return [
        file
        for file in on_disk.files_below(root, links=False, leave_out=_STDLIB_LEAVES_OUT)
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]


def _files(source: str, root: pathlib.Path, files: list[pathlib.Path], data: Data) -> Source:
    def documents():
        for file, name, size in zip(files, names, sizes, strict=True):
            if file.suffix not in _ROWS:
                pieces = ((piece, len(piece.encode())) for piece in on_disk.pieces(file))
                yield Document(name, repr(str(file)), size, False, pieces)
                continue
            rows = _ROWS[file.suffix](file, data.column)
            yield from _numbered(rows, f"data.column={data.column!r} of {str(file)!r}")

    names = [file.relative_to(root).as_posix() for file in files]
    stats = [on_disk.stat(file) for file in files]
    sizes = [stat.st_size for stat in stats]
    times = [stat.st_mtime_ns for stat in stats]
    known = repr((list(zip(names, sizes, times, strict=True)), data.column))
    return Source(source, known, sum(sizes), documents)


def _jsonl(file: pathlib.Path, column: str) -> Iterator[tuple[Any, int]]:
    """A field of each line, and the line's bytes."""
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield _field(line, f"line {number} of {str(file)!r}", column), len(line)
    except OSError as error:
        on_disk.refuse(error)


def _field(line: bytes, where: str, column: str) -> Any:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); fix or remove it.") from error
    if not isinstance(row, dict) or column not in row:
        known = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no field data.column={column!r}; write one of {known}.")
    return row[column]


def _parquet(file: pathlib.Path, column: str) -> Iterator[tuple[Any, int]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"{str(file)!r} needs the package pyarrow; run pip install -e '.[huggingface]' in the "
            "checkout."
        )
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if column not in names:
                raise ValueError(
                    f"data.column={column!r} is not a column of {str(file)!r}; write one of "
                    f"{names}."
                )
            each = file.stat().st_size // max(1, opened.metadata.num_rows)
            for batch in opened.iter_batches(batch_size=256, columns=[column]):
                yield from ((value.as_py(), each) for value in batch.column(0))
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{str(file)!r} cannot be read as parquet: {error}") from error


_ROWS = {".jsonl": _jsonl, ".parquet": _parquet}


def _numbered(rows: Iterable[tuple[Any, int]], where: str) -> Iterator[Document]:
    for number, (value, read) in enumerate(rows, 1):
        yield _row(value, f"row {number} of {where}", read)


def _row(value: Any, where: str, read: int) -> Document:
    is_chat = isinstance(value, list) and bool(value)
    is_chat = is_chat and all(isinstance(message, dict) for message in value)
    if not is_chat and not isinstance(value, str):
        text = repr(value)[:80]
        raise ValueError(f"{where} holds {text}; choose one of strings, or of messages of chats.")
    # A template may show the order of keys, but chats that differ only in it stay together.
    content, ranked = (
        text.encode("utf-8", "replace")
        for text in ((_dumped(value, False), _dumped(value, True)) if is_chat else (value, value))
    )
    pieces = iter([(content.decode(), read)])
    return Document(hashlib.sha256(ranked).hexdigest(), where, len(content), is_chat, pieces)


def _dumped(messages: list[dict[str, Any]], sort: bool) -> str:
    return json.dumps(messages, sort_keys=sort, ensure_ascii=False, default=str)


def _rows_of_a_set(data: Data, name: str) -> Source:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"data.huggingface={name!r} needs the package datasets; "
            f"run pip install -e '.[huggingface]' in the checkout."
        )
    import datasets

    saved, split = pathlib.Path(name), data.huggingface_split
    try:
        if (saved / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(saved))[split]
        elif (saved / "state.json").is_file():
            rows = datasets.load_from_disk(str(saved))
        else:
            rows = datasets.load_dataset(name, data.huggingface_subset, split=split)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"data.huggingface={name!r}, split {split!r}, cannot be loaded: {error}"
        ) from error
    column = data.column
    if column not in rows.column_names:
        raise ValueError(
            f"data.column={column!r} is not a column of {name!r}; write one of {rows.column_names}."
        )

    def read():
        for batch in rows.select_columns([column]).iter(batch_size=256):
            yield from ((value, 1) for value in batch[column])

    documents = lambda: _numbered(read(), f"data.column={column!r} of {name!r}")
    return Source(
        f"huggingface:{name}", repr((rows._fingerprint, column)), rows.num_rows, documents
    )
