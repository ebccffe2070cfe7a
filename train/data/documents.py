"""Iterates over a corpus's documents: text files, and rows of files or of Hugging Face sets.

About one row, or one mebibyte of a file, is in memory at a time.
"""

import hashlib
import importlib.util
import json
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from train import checks
from train.data import files as on_disk
from train.data import rows
from train.data.sources import Data

_STDLIB_LEAVES_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo")
)
_COMPRESSED = frozenset(".gz .bz2 .xz .lzma .zst .lz4 .br .zip .7z .rar .tar .tgz .txz".split())


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
            read_rows = rows.KINDS.get(file.suffix.lower())
            if read_rows is None:
                pieces = ((piece, len(piece.encode())) for piece in on_disk.pieces(file))
                yield Document(name, repr(str(file)), size, False, pieces)
                continue
            where = f"data.column={data.column!r} of {str(file)!r}"
            yield from _numbered(read_rows(file, data.column), where)

    _require_readable(source, files, data)
    names = [file.relative_to(root).as_posix() for file in files]
    stats = [on_disk.stat(file) for file in files]
    sizes = [stat.st_size for stat in stats]
    times = [stat.st_mtime_ns for stat in stats]
    known = repr((list(zip(names, sizes, times, strict=True)), data.column))
    return Source(source, known, sum(sizes), documents)


def _require_readable(source: str, files: list[pathlib.Path], data: Data) -> None:
    """Raises a ValueError for compressed files, and for a column where no file has rows."""
    for file in files:
        if file.suffix.lower() in _COMPRESSED:
            raise ValueError(
                f"{str(file)!r} is compressed, which is not read; decompress it and take it out."
            )
    found = sorted({file.suffix.lower() for file in files})
    if data.column != Data.column and not rows.KINDS.keys() & found:
        raise ValueError(
            f"data.column={data.column!r} names a field of rows, but {source} has only {found}; "
            f"leave it out, or name files that end with one of {[*rows.KINDS]}."
        )


def _numbered(values: Iterable[tuple[Any, int]], where: str) -> Iterator[Document]:
    for number, (value, read) in enumerate(values, 1):
        yield _row(value, f"row {number} of {where}", read)


def _row(value: Any, where: str, read: int) -> Document:
    is_chat = isinstance(value, list) and bool(value)
    is_chat = is_chat and all(isinstance(message, dict) for message in value)
    if not is_chat and not isinstance(value, str):
        text = repr(value)[:80]
        raise ValueError(f"{where} holds {text}; choose one of strings, or of messages of chats.")
    # A template may show the order of keys, but chats that differ only in it stay together.
    try:
        texts = (_dumped(value, False), _dumped(value, True)) if is_chat else (value, value)
    except RecursionError as error:
        raise ValueError(f"{where} nests too deeply; take it out.") from error
    content, ranked = (text.encode("utf-8", "replace") for text in texts)
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
    import pyarrow

    saved, split, column = pathlib.Path(name), data.huggingface_split, data.column
    try:
        if (folder := _saved(saved, split)) is not None:
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(name, data.huggingface_subset, split=split)
        known = found.column_names
    except Exception as error:  # of any kind: the package does not say which
        raise ValueError(
            f"data.huggingface={name!r}, split {split!r}, cannot be loaded: {error}"
        ) from error
    if column not in known:
        raise ValueError(
            f"data.column={column!r} is not a column of {name!r}; write one of {known!s:.200}."
        )

    def read():
        chosen = found.with_format(None).select_columns([column])  # a saved one may hide columns
        try:
            chosen.data.table.validate(full=True)  # Arrow would follow wrong offsets out of memory
            for batch in chosen.iter(batch_size=256):
                yield from ((rows.without_nulls(value), 1) for value in batch[column])
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise ValueError(f"{name!r} is damaged: {error}; save it again.") from error

    documents = lambda: _numbered(read(), f"data.column={column!r} of {name!r}")
    return Source(
        f"huggingface:{name}", repr((found._fingerprint, column)), found.num_rows, documents
    )


def _saved(saved: pathlib.Path, split: str) -> pathlib.Path | None:
    """The folder in which the package saved a split, with the files it names; None: no such."""
    if (saved / "dataset_dict.json").is_file():
        splits = checks.json_object(saved / "dataset_dict.json", splits=list[str])["splits"]
        if split not in splits:
            raise ValueError(f"it has only the splits {splits}")
        saved /= split
    elif not (saved / "state.json").is_file():
        return None
    files = {"_data_files": list[dict[str, str]], "_fingerprint": str}
    for each in checks.json_object(saved / "state.json", **files)["_data_files"]:
        place = pathlib.PurePath(each.get("filename", ""))
        if len(place.parts) != 1 or place.name != str(place):
            raise ValueError(f"{saved}/state.json names the file {str(place)!r}, elsewhere")
        on_disk.stat(saved / place)
    on_disk.stat(saved / "dataset_info.json")
    return saved
