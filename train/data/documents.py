"""Iterates over a corpus's documents: text files, and rows of files or of Hugging Face sets.

About one row, or one mebibyte of a file, is in memory at a time.
"""

import hashlib
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
      is_chat: Whether its text is JSON: the messages of a chat or, with tools, an object of
        `messages` and `tools`.
      has_tools: Whether there are tools.
      pieces: Its text in pieces, one in memory at a time, each with the amount read of the total.
    """

    name: str
    where: str
    size: int
    is_chat: bool
    has_tools: bool
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
      ValueError: If something is missing or cannot be listed; while reading, if it is not text, or
        no chat has the tools that are asked for.
    """
    found = _find(data)
    return found._replace(documents=lambda: _require_tools(found, data))


def _require_tools(found: Source, data: Data) -> Iterator[Document]:
    missing = data.tools is not None
    for document in found.documents():
        missing = missing and not document.has_tools
        yield document
    if missing:
        raise ValueError(
            f"no chat of {found.name} has the field data.tools={data.tools!r}; write the name of "
            "the field with their tools, or leave it out."
        )


def _find(data: Data) -> Source:
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


def _columns(data: Data) -> rows.Columns:
    return {"column": data.column} | ({} if data.tools is None else {"tools": data.tools})


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
                yield Document(name, repr(str(file)), size, False, False, pieces)
                continue
            where = f"data.column={data.column!r} of {str(file)!r}"
            yield from _numbered(read_rows(file, _columns(data)), where)

    _require_readable(source, files, data)
    names = [file.relative_to(root).as_posix() for file in files]
    stats = [on_disk.stat(file) for file in files]
    sizes = [stat.st_size for stat in stats]
    times = [stat.st_mtime_ns for stat in stats]
    known = repr((list(zip(names, sizes, times, strict=True)), *_columns(data).values()))
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


def _numbered(values: Iterable[tuple[list[Any], int]], where: str) -> Iterator[Document]:
    for number, (row, read) in enumerate(values, 1):
        yield _row(f"row {number} of {where}", read, *row)


def _row(where: str, read: int, value: Any, tools: Any = None) -> Document:
    is_chat = isinstance(value, list) and bool(value)
    is_chat = is_chat and all(isinstance(message, dict) for message in value)
    if not is_chat and not isinstance(value, str):
        text = repr(value)[:80]
        raise ValueError(f"{where} holds {text}; choose one of strings, or of messages of chats.")
    tools = _listed(tools, where)
    if tools is not None and is_chat:
        value = {"messages": value, "tools": tools}
    # A template may show the order of keys, but chats that differ only in it stay together.
    try:
        texts = (_dumped(value, False), _dumped(value, True)) if is_chat else (value, value)
    except RecursionError as error:
        raise ValueError(f"{where} nests too deeply; take it out.") from error
    content, ranked = (text.encode("utf-8", "replace") for text in texts)
    pieces = iter([(content.decode(), read)])
    name = hashlib.sha256(ranked).hexdigest()
    return Document(name, where, len(content), is_chat, is_chat and tools is not None, pieces)


def _listed(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a row: a table often holds their text, and an empty one where there are none."""
    found = tools
    if isinstance(tools, str):
        try:
            found = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            text = f"{where} has tools that are not JSON ({error}): {tools:.80}"
            raise ValueError(text) from error
    if found is None or isinstance(found, list) and all(isinstance(each, dict) for each in found):
        return found
    raise ValueError(
        f"{where} has the tools {tools!r:.80}; needs a list of JSON schemas, or the text of one."
    )


def _dumped(chat: Any, sort: bool) -> str:
    return json.dumps(chat, sort_keys=sort, ensure_ascii=False, default=str)


def _rows_of_a_set(data: Data, name: str) -> Source:
    checks.require_package(f"data.huggingface={name!r}", "datasets", extra="huggingface")
    import datasets
    import pyarrow

    saved, split, columns = pathlib.Path(name), data.huggingface_split, _columns(data)
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
    rows.require_columns(known, columns, repr(name))

    def read():
        # A saved one may hide columns.
        chosen = found.with_format(None).select_columns([*columns.values()])
        try:
            chosen.data.table.validate(full=True)  # Arrow would follow wrong offsets out of memory
            for batch in chosen.iter(batch_size=256):
                for row in zip(*map(batch.get, columns.values()), strict=True):
                    yield [rows.without_nulls(value) for value in row], 1
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise ValueError(f"{name!r} is damaged: {error}; save it again.") from error

    documents = lambda: _numbered(read(), f"data.column={data.column!r} of {name!r}")
    fingerprint = repr((found._fingerprint, *columns.values()))
    return Source(f"huggingface:{name}", fingerprint, found.num_rows, documents)


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
