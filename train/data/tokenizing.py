"""The one pass over a corpus that writes its tokens to disk."""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from train.data import chat
from train.data.documents import Document, Source
from train.data.held_out import rank
from train.data.sources import Data
from train.data.tokenizer import Tokenizer
from train.output.progress import counted

PARTS = ("train", "validation")
_MOST = 1 << 20, 1000  # most characters, and pieces, that are tokenized at once


class _Piece(NamedTuple):
    document: Document
    is_first: bool  # of its document
    text: str
    read: int  # of the source's total


# Pieces of documents -> for each its tokens, and which of them are targets.
Encode = Callable[[list[_Piece]], Iterable[tuple[np.ndarray, np.ndarray | None]]]


def write(folder: pathlib.Path, source: Source, tokenizer: Tokenizer, data: Data) -> dict[str, Any]:
    """Writes the tokens of both parts of a corpus, the ends of documents, and the targets.

    Args:
      folder: An empty folder.
      source: The documents.
      tokenizer: The tokenizer.
      data: Has the share held out; see `token_files.prepare`.

    Returns:
      {"record": for the run, "parts": {"train": ..., "validation": ...}} with type and size of the
      files, for `token_files.load`.

    Raises:
      ValueError: If there are no documents, one is not text, or texts and chats are mixed.
    """
    fraction = data.validation_fraction
    record, parts, lowest = _pass(folder, source, tokenizer, data, fraction)
    if record["documents"] > 1 and not parts["validation"]["documents"]:
        record, parts, _ = _pass(folder, source, tokenizer, data, lowest)
    if record["documents"] == 1:
        _cut_end(folder, parts, fraction)
    counts = {f"{part}_documents": parts[part]["documents"] for part in PARTS}
    return {"record": record | counts, "parts": parts}


def _pass(folder, source: Source, tokenizer: Tokenizer, data: Data, limit: float):
    """Tokenizes everything; returns the record, sizes of both parts, and the lowest rank."""
    digest, lowest, count, size, part = hashlib.sha256(), 1.0, 0, 0, None
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(counted(f"tokenizing {source.name}", source.total))
        outs, encode, begin = None, None, ()
        for pieces in _grouped(source.documents()):
            if outs is None:
                is_chat = pieces[0].document.is_chat
                outs = {name: _Out(folder, name, stack, tokenizer, is_chat) for name in PARTS}
                encode = _chats(tokenizer, data) if is_chat else _texts(tokenizer)
                begin = () if is_chat else tokenizer.begin
            if any(piece.document.is_chat != is_chat for piece in pieces):
                raise ValueError(f"{source.name} has texts and chats; take only one kind.")
            for piece, (tokens, asked) in zip(pieces, encode(pieces), strict=True):
                document = piece.document
                if piece.is_first:
                    count, size = count + 1, size + document.size
                    name = document.name
                    digest.update(os.fsencode(f"{len(name)} {name} {document.size} "))
                    lowest = min(lowest, rank(name))
                    part = outs["validation" if rank(name) <= limit else "train"]
                    part.begin(begin)
                digest.update(piece.text.encode())
                part.write(tokens, asked)
            show(sum(piece.read for piece in pieces))
        if outs is None or not size:
            raise ValueError(f"{source.name} holds no text; name a text file or a folder of some.")
        parts = {name: out.end() for name, out in outs.items()}
    record = {"source": source.name, "sha256": digest.hexdigest(), "documents": count}
    record |= {"bytes": size}
    if data.tokenizer is not None:
        both = f"{record['sha256']} {tokenizer.sha256}"
        record |= {"sha256": hashlib.sha256(both.encode()).hexdigest(), "vocab": tokenizer.vocab}
    return record, parts, lowest


def _grouped(found: Iterator[Document]) -> Iterator[list[_Piece]]:
    """Groups of pieces that are tokenized at once."""
    pieces, size = [], 0
    for document in found:
        is_first = True
        for text, read in document.pieces:
            pieces.append(_Piece(document, is_first, text, read))
            is_first, size = False, size + len(text)
            if size >= _MOST[0] or len(pieces) == _MOST[1]:
                yield pieces
                pieces, size = [], 0
    if pieces:
        yield pieces


def _texts(tokenizer: Tokenizer) -> Encode:
    texts_of = lambda pieces: [piece.text for piece in pieces]
    return lambda pieces: [(tokens, None) for tokens in tokenizer.encode(texts_of(pieces))]


def _chats(tokenizer: Tokenizer, data: Data) -> Encode:
    if not data.packed:
        raise ValueError(
            f"data.column={data.column!r} holds chats, which are trained on whole; write "
            "--data.packed."
        )
    tokens_of = None

    def encode(pieces):
        nonlocal tokens_of
        for piece in pieces:
            try:
                tokens_of = tokens_of or chat.encoder(tokenizer, str(data.tokenizer))
                yield tokens_of(piece.text)
            except ValueError as error:
                raise ValueError(f"{piece.document.where}: {error}") from error

    return encode


class _Out:
    """The files of a part."""

    def __init__(self, folder, name, stack, tokenizer: Tokenizer, is_chat: bool):
        kinds = ("tokens", "ends", "asked")[: 3 if is_chat else 2]
        opened = lambda kind: stack.enter_context((folder / f"{name}.{kind}").open("wb"))
        self.files = {kind: opened(kind) for kind in kinds}
        self.between = np.array(() if is_chat else tokenizer.end, np.int64)
        self.vocab = tokenizer.vocab
        self.dtype = np.min_scalar_type(tokenizer.vocab - 1)
        self.size = self.documents = 0

    def begin(self, tokens: tuple[int, ...]) -> None:
        if self.documents:
            self.write(self.between, None)
            self.files["ends"].write(np.int64(self.size).tobytes())
        self.documents += 1
        self.write(np.array(tokens, np.int64), None)

    def write(self, tokens: np.ndarray, asked: np.ndarray | None) -> None:
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            raise ValueError(
                f"a text has the token {tokens.max()}, but the tokenizer's largest is "
                f"{self.vocab - 1}; download its tokenizer.json again."
            )
        self.files["tokens"].write(tokens.astype(self.dtype).tobytes())
        if "asked" in self.files and asked is not None:
            self.files["asked"].write(asked.tobytes())
        self.size += tokens.size

    def end(self) -> dict[str, Any]:
        if self.documents:
            self.files["ends"].write(np.int64(self.size).tobytes())
        facts = {"dtype": self.dtype.name, "size": self.size, "documents": self.documents}
        return facts | {"asked": "asked" in self.files}


def _cut_end(folder: pathlib.Path, parts: dict[str, dict], fraction: float) -> None:
    """Holds out the end of the only document."""
    whole = max(PARTS, key=lambda name: parts[name]["documents"])
    size = parts[whole]["size"]
    cut = round(size * (1 - fraction))
    for kind, width in (("tokens", np.dtype(parts[whole]["dtype"]).itemsize), ("asked", 1)):
        file, train, rest = (folder / f"{name}.{kind}" for name in (whole, *PARTS))
        if file.exists():
            file.rename(train)
            with train.open("r+b") as old, rest.open("wb") as new:
                old.seek(cut * width)
                shutil.copyfileobj(old, new)
                old.truncate(cut * width)
    for name, count in zip(PARTS, (cut, size - cut), strict=True):
        (folder / f"{name}.ends").write_bytes(np.int64(count).tobytes())
        parts[name] |= {"size": count, "documents": 1}
