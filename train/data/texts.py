"""Text as bytes: what is read, what is held out, and which bytes a step sees."""

import hashlib
import importlib.util
import os
import pathlib
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from train.data.sources import Data

_STDLIB_LEAVES_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo")
)


class Corpus(NamedTuple):
    """Two disjoint texts, and the record of where they came from.

    Attributes:
      train: u8[size], the documents to train on, joined by newlines.
      validation: u8[size], the documents held out.
      record: Source, sha256 of all names and contents, and counts of documents and bytes;
        plain values, for the record of the run.
    """

    train: np.ndarray
    validation: np.ndarray
    record: dict[str, str | int]


Document = tuple[str, bytes]  # name and content


def read(data: Data, context: int) -> Corpus:
    """Reads the text that a configuration names and holds out a part of it.

    A document (a file, a row) is held out if the hash of its name (of a row: its text) is
    below `data.validation_fraction`, whatever else there is; if that picks none, the one
    with the lowest hash is. A single document has its end held out instead.

    Args:
      data: What to read. Files are UTF-8 text; hidden ones are not read.
      context: Tokens of one sequence, to see that there is enough text for it.

    Returns:
      The corpus, equal on every machine that reads the same names and contents.

    Raises:
      ValueError: If something is missing, unreadable, not text, or too short.
    """
    if data.huggingface is not None:
        source, documents = f"huggingface:{data.huggingface}", _huggingface(data)
    elif data.path is not None:
        source, documents = data.path, _user_files(pathlib.Path(data.path))
    else:
        source, documents = "python standard library", _standard_library()
    if not documents:
        raise ValueError(f"{source} holds no text; name a text file or a folder with some.")
    train, validation = _hold_out(documents, data.validation_fraction)
    corpus = Corpus(_join(train), _join(validation), _record(source, documents, train, validation))
    for part in ("train", "validation"):
        if (size := getattr(corpus, part).size) <= context:
            raise ValueError(
                f"{source} leaves {size} bytes for {part}, but one sequence needs {context + 1}; "
                f"add text, or lower model.context or change data.validation_fraction="
                f"{data.validation_fraction}."
            )
    return corpus


def batch(
    tokens: np.ndarray,
    seed: int,
    step: int,
    batch_size: int,
    context: int,
    rows: slice = slice(None),
) -> np.ndarray:
    """Draws the sequences of one step: a pure function of its arguments.

    Positions are uniform over the text, with replacement. A row is the same whichever
    process makes it, so each process makes only its own.

    Args:
      tokens: u8[size], size > context.
      seed: Seed of the run, in [0, 2^64).
      step: Step of the optimizer, in [0, 2^64).
      batch_size: Sequences of the whole step.
      context: Tokens to predict in a sequence.
      rows: Which of the sequences to make.

    Returns:
      i32[rows, context + 1]; inputs are `[:, :-1]`, targets `[:, 1:]`.
    """
    # Raw words of Philox are stable across NumPy's versions; its samplers need not be.
    # The step is the counter's second word: the first one counts the words drawn.
    words = np.random.Philox(key=seed, counter=step << 64).random_raw(batch_size)
    return _windows(tokens, words[rows] % np.uint64(tokens.size - context), context)


def validation_batch(
    tokens: np.ndarray,
    index: int,
    num_batches: int,
    batch_size: int,
    context: int,
    rows: slice = slice(None),
) -> np.ndarray:
    """Makes one of the fixed validation batches: sequences evenly spaced over the text.

    The same for every run, seed and step. Sequences overlap only if the text is shorter
    than all of them together.

    Args:
      tokens: u8[size], size > context.
      index: Index of the batch, in [0, num_batches).
      num_batches: Validation batches of one evaluation.
      batch_size: Sequences of a batch.
      context: Tokens to predict in a sequence.
      rows: Which of the batch's sequences to make.

    Returns:
      i32[rows, context + 1].
    """
    total = num_batches * batch_size
    number = np.arange(index * batch_size, (index + 1) * batch_size)[rows]
    return _windows(tokens, number * (tokens.size - context - 1) // max(1, total - 1), context)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    positions = starts.astype(np.int64)[:, None] + np.arange(context + 1)[None, :]
    return tokens[positions].astype(np.int32)


def _standard_library() -> list[Document]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata describes how this machine's Python was built: not text of the library.
    files = [
        file
        for file in files_below(root, links=False)
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and not _STDLIB_LEAVES_OUT.intersection(file.relative_to(root).parts)
    ]
    return [(file.relative_to(root).as_posix(), file.read_bytes()) for file in files]


def _user_files(root: pathlib.Path) -> list[Document]:
    if not root.exists():
        raise ValueError(f"data.path={str(root)!r} does not exist; name a text file or a folder.")
    if root.is_file():
        return [(root.name, _text(root))]
    return [(file.relative_to(root).as_posix(), _text(file)) for file in files_below(root)]


def files_below(root: pathlib.Path, links: bool = True) -> list[pathlib.Path]:
    """All files of a folder and of those in it, in the order of their names; no hidden ones.

    Args:
      root: The folder.
      links: Whether to follow links to folders, but for those to a folder that they are in.

    Raises:
      ValueError: If a folder cannot be listed.
    """
    found = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse, followlinks=links):
        path = pathlib.Path(folder)
        above = {os.path.realpath(each) for each in (path, *path.parents)}
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and os.path.realpath(path / name) not in above
        ]
        found += [pathlib.Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _refuse(error: OSError) -> None:
    raise ValueError(f"{error.filename!r} cannot be read ({error.strerror}).") from error


def content_of(file: pathlib.Path) -> bytes:
    """The bytes of a file; a ValueError if it cannot be read."""
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise ValueError(f"{str(file)!r} is no file; take it out.")
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(error)


def _text(file: pathlib.Path) -> bytes:
    content = content_of(file)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(file)!r} is not UTF-8 text (byte {error.start}); convert it or take it out."
        ) from error
    if b"\0" in content:
        raise ValueError(f"{str(file)!r} is binary: it holds NUL bytes; take it out.")
    return content


def _huggingface(data: Data) -> list[Document]:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"data.huggingface={data.huggingface!r} needs the package datasets; "
            f"run pip install -e '.[huggingface]' in the checkout."
        )
    import datasets

    saved = pathlib.Path(data.huggingface)
    try:
        if (saved / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(saved))[data.huggingface_split]
        elif (saved / "state.json").is_file():
            rows = datasets.load_from_disk(str(saved))
        else:
            rows = datasets.load_dataset(
                data.huggingface, data.huggingface_subset, split=data.huggingface_split
            )
    except (OSError, KeyError) as error:
        raise ValueError(
            f"data.huggingface={data.huggingface!r}, split {data.huggingface_split!r}, cannot be "
            f"loaded: {error}"
        ) from error
    if data.huggingface_column not in rows.column_names:
        raise ValueError(
            f"data.huggingface_column={data.huggingface_column!r} is not a column of "
            f"{data.huggingface!r}; write one of {rows.column_names}."
        )
    return [_row(value, data) for value in rows[data.huggingface_column]]


def _row(value: object, data: Data) -> Document:
    if not isinstance(value, str):
        raise ValueError(
            f"data.huggingface_column={data.huggingface_column!r} holds {value!r}; "
            f"choose a column of strings."
        )
    content = value.encode()
    return hashlib.sha256(content).hexdigest(), content


def _hold_out(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    if len(documents) == 1:
        name, content = documents[0]
        cut = round(len(content) * (1 - fraction))
        return [(name, content[:cut])], [(name, content[cut:])]
    held = held_out([name for name, _ in documents], fraction)
    pairs = list(zip(documents, held, strict=True))
    train = [document for document, is_held in pairs if not is_held]
    return train, [document for document, is_held in pairs if is_held]


def held_out(names: list[str], fraction: float) -> list[bool]:
    """Says which of several things are held out: a matter of each one's name alone.

    Args:
      names: Names of the things.
      fraction: Share to hold out, in (0, 1).

    Returns:
      Whether the hash of each name is below `fraction`; if none is, that of the lowest.
    """
    ranks = [int.from_bytes(hashlib.sha256(os.fsencode(n)).digest()[:8]) / 2**64 for n in names]
    limit = max(fraction, min(ranks))
    return [rank <= limit for rank in ranks]


def _join(documents: Iterable[Document]) -> np.ndarray:
    return np.frombuffer(b"\n".join(content for _, content in documents), np.uint8)


def _record(
    source: str, documents: list[Document], train: list[Document], validation: list[Document]
) -> dict[str, str | int]:
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(os.fsencode(f"{len(name)} {name} {len(content)} "))
        digest.update(content)
    return {
        "source": source,
        "sha256": digest.hexdigest(),
        "documents": len(documents),
        "bytes": sum(len(content) for _, content in documents),
        "train_documents": len(train),
        "validation_documents": len(validation),
    }
