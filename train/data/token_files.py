"""Tokens of a corpus on disk: written once, memory-mapped by all runs that read them."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from train.data import documents, tokenizing
from train.data.documents import Source
from train.data.once import once
from train.data.sources import Data
from train.data.tokenizer import Tokenizer, load_tokenizer

_RECORD = "corpus.json"


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
    """

    train: np.ndarray
    validation: np.ndarray
    record: dict[str, Any]
    parts: dict[str, Part]


def prepare(data: Data, folder: pathlib.Path) -> pathlib.Path:
    """Writes the tokens of a corpus, unless the same files and tokenizer were written before.

    A document is held out if the hash of its name (for a row: of its text) is below
    `data.validation_fraction`. If there is none, the document with the lowest hash is held out. For
    a single document, its end is held out.

    Args:
      data: What to read.
      folder: Folder of all corpora, one subfolder each.

    Returns:
      The folder of this corpus, for `load`.

    Raises:
      ValueError: If something is missing, unreadable or not text.
      OSError: If the files cannot be written.
    """
    source, tokenizer = documents.find(data), load_tokenizer(data.tokenizer)
    key = source.fingerprint, tokenizer.sha256, data.validation_fraction
    return once(folder, key, lambda new: _write(new, source, tokenizer, data))


def load(folder: pathlib.Path) -> Corpus:
    """Maps the files written by `prepare`.

    Raises:
      ValueError: If they are damaged.
    """
    try:
        found = json.loads((folder / _RECORD).read_text())
        parts = {name: _mapped(folder, name, **found["parts"][name]) for name in tokenizing.PARTS}
        record = found["record"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} is damaged: {error}; remove it.") from error
    return Corpus(parts["train"].tokens, parts["validation"].tokens, record, parts)


def _write(new: pathlib.Path, source: Source, tokenizer: Tokenizer, data: Data) -> None:
    facts = tokenizing.write(new, source, tokenizer, data)
    (new / _RECORD).write_text(json.dumps(facts))


def _mapped(folder, name, dtype, size, documents, asked) -> Part:
    def array(kind, dtype, count):
        file = folder / f"{name}.{kind}"
        if file.stat().st_size != count * np.dtype(dtype).itemsize:
            raise ValueError(f"{file.name} has {file.stat().st_size} bytes")
        return np.asarray(np.memmap(file, dtype, "r")) if count else np.zeros(0, dtype)

    ends = array("ends", "int64", documents)
    return Part(array("tokens", dtype, size), ends, array("asked", "bool", size) if asked else None)
