"""Tokens of a corpus on disk: written once, memory-mapped by all runs that read them."""

import hashlib
import json
import os
import pathlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np

from train import checks
from train.data import documents, tokenizing
from train.data.documents import Source
from train.data.once import once
from train.data.sources import Data
from train.data.tokenizer import Tokenizer, load_tokenizer

_RECORD = "corpus.json"
_PIECE = 1 << 24  # bytes of one checksum


class Part(NamedTuple):
    """Concatenated documents, in memory-mapped files.

    Attributes:
      tokens: u8, u16 or u32[size].
      ends: i64[documents], the end of each in `tokens`.
      asked: bool[size], which tokens are targets; None: all.
    """

    tokens: np.ndarray
    ends: np.ndarray
    asked: np.ndarray | None


class Corpus(NamedTuple):
    """Two disjoint parts of a corpus, and the record of where they came from.

    Attributes:
      train: Tokens of documents to train on.
      validation: Tokens of held-out documents.
      record: Source, sha256 of all names and contents, and counts; plain values, for the record
        of the run.
      parts: "train" and "validation" with all their files.
      vocab: One more than the largest token of the tokenizer, or of the files: of bytes, and where
        it is larger.
      folder: Where the files are.
    """

    train: np.ndarray
    validation: np.ndarray
    record: dict[str, Any]
    parts: dict[str, Part]
    vocab: int
    folder: pathlib.Path


def prepare(data: Data, folder: pathlib.Path, vocab: int | None = None) -> pathlib.Path:
    """Writes the tokens of a corpus, unless the same files and tokenizer were written before.

    A document is held out if the hash of its name (for a row: of its text) is below
    `data.validation_fraction`. If there is none, the document with the lowest hash is held out. For
    a single document, its end is held out.

    Args:
      data: What to read.
      folder: Folder of all corpora, one subfolder each.
      vocab: The model's number of tokens, to refuse a tokenizer with more before all is read; None:
        any.

    Returns:
      The folder of this corpus, for `load`.

    Raises:
      ValueError: If something is missing, unreadable or not text, or the tokenizer has larger
        tokens than the model.
      OSError: If the files cannot be written.
    """
    source, tokenizer = documents.find(data), load_tokenizer(data.tokenizer)
    if vocab is not None and data.tokenizer is not None:
        require_fit(tokenizer.vocab, vocab, data)
    key = source.fingerprint, tokenizer.sha256, data.validation_fraction
    return once(folder, key, lambda new: _write(new, source, tokenizer, data))


def require_fit(found: int, vocab: int, data: Data) -> None:
    """Raises a ValueError if there are tokens that a model of `vocab` tokens does not have."""
    if found > vocab:
        raise ValueError(
            f"data.tokenizer={data.tokenizer!r} has the token {found - 1}, but model.vocab is "
            f"{vocab}, so that tokens end at {vocab - 1}; write --model.vocab {found}, or for a "
            "pretrained model name its own tokenizer."
        )


def load(folder: pathlib.Path) -> Corpus:
    """Maps the files written by `prepare`, and compares all of them with their checksums.

    So each start reads all tokens once. Damage would otherwise change what a run learns, unnoticed.

    Raises:
      ValueError: If they are damaged.
    """
    try:
        found = checks.json_object(
            folder / _RECORD, record=dict[str, Any], parts=dict[str, Any], sha256=str
        )
        if found.pop("sha256") != _sha256(found):
            raise ValueError(f"{_RECORD} differs from its own checksum")
        parts = {name: _mapped(folder, name, found["parts"]) for name in tokenizing.PARTS}
        record = found["record"]
        checks.require_keys({"vocab": 0} | record, _RECORD, vocab=int, source=str, sha256=str)
    except (OSError, ValueError) as error:
        if isinstance(error.__cause__ or error, PermissionError):  # of another user
            raise ValueError(f"{folder} is closed: {error}; write another --data.cache.") from error
        raise ValueError(f"{folder} is damaged: {error}; remove it.") from error
    vocab = max(record.get("vocab", 0), *(1 + largest for _, largest in parts.values()))
    train, validation = (part for part, _ in parts.values())
    both = {"train": train, "validation": validation}
    return Corpus(train.tokens, validation.tokens, record, both, vocab, folder)


def require_whole(corpus: Corpus) -> None:
    """Raises a ValueError if a mapped file has another size now: reading on may be a SIGBUS."""
    for name, part in corpus.parts.items():
        for kind, mapped in part._asdict().items():
            while isinstance(mapped, np.ndarray):
                mapped = mapped.base
            if mapped is not None and mapped.size() != len(mapped):
                raise ValueError(
                    f"{corpus.folder}/{name}.{kind} was cut or replaced while this run read it; "
                    f"remove {corpus.folder}, and start the same command again."
                )


def _write(new: pathlib.Path, source: Source, tokenizer: Tokenizer, data: Data) -> None:
    facts = tokenizing.write(new, source, tokenizer, data)
    for name, part in facts["parts"].items():
        part["crc32"] = {
            kind: sums(_array(new, name, kind, dtype, count)).crc32
            for kind, (dtype, count) in _kinds(part).items()
        }
    (new / _RECORD).write_text(json.dumps(facts | {"sha256": _sha256(facts)}))


def _sha256(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _kinds(part: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """The files of a part: type and number of their values."""
    kinds = {"tokens": (part["dtype"], part["size"]), "ends": ("int64", part["documents"])}
    return kinds | ({"asked": ("bool", part["size"])} if part["asked"] else {})


def _mapped(folder: pathlib.Path, name: str, parts: dict[str, Any]) -> tuple[Part, int]:
    """A part, and its largest token."""
    checks.require_keys(parts, _RECORD, **{name: dict[str, Any]})
    facts, dtypes = parts[name], Literal["uint8", "uint16", "uint32"]
    kinds = {"size": int, "documents": int, "asked": bool, "crc32": dict[str, list[int]]}
    checks.require_keys(facts, f"{_RECORD}: {name}", dtype=dtypes, **kinds)
    arrays = {"asked": None}
    for kind, (dtype, count) in _kinds(facts).items():
        arrays[kind] = _array(folder, name, kind, dtype, count)
        found = sums(arrays[kind])
        if found.crc32 != facts["crc32"].get(kind):
            raise ValueError(f"{name}.{kind} differs from its checksum")
        if kind == "tokens":
            largest = found.largest
    part = Part(**arrays)
    if np.any(np.diff(part.ends, prepend=0, append=facts["size"]) < 0):
        raise ValueError(f"{name}.ends are not in order")
    return part, largest


def _array(folder: pathlib.Path, name: str, kind: str, dtype: str, count: int) -> np.ndarray:
    with checks.open_file(folder / f"{name}.{kind}") as file:
        size = os.fstat(file.fileno()).st_size
        if size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{name}.{kind} has {size} bytes")
        return np.asarray(np.memmap(file, dtype, "r")) if count else np.zeros(0, dtype)


class Sums(NamedTuple):
    """What one pass over an array finds.

    Attributes:
      crc32: CRC-32 of each 16 MiB; it finds accidents, not intent.
      largest: The largest value; -1 if there is none.
    """

    crc32: list[int]
    largest: int


def sums(values: np.ndarray) -> Sums:
    """Reads an array of whole numbers in one pass of all cores, some gigabytes a second on each.

    Args:
      values: [size], for example mapped from a file.
    """
    count = _PIECE // values.itemsize

    def look(first: int) -> tuple[int, int]:
        piece = values[first : first + count]
        return zlib.crc32(piece.view(np.uint8)), int(piece.max())

    with ThreadPoolExecutor() as pool:  # neither function holds Python's lock
        found = list(pool.map(look, range(0, values.size, count)))
    return Sums([crc32 for crc32, _ in found], max((most for _, most in found), default=-1))
