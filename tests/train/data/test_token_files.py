"""Tokens on disk: written once, as the documents say, within little memory."""

import json
import tracemalloc

import numpy as np
import pytest

from tests.helpers import tokens
from tests.helpers.corpora import write
from train import checks
from train.config import Data
from train.data import texts, token_files, tokenizing
from train.data.tokenizer import load_tokenizer


def test_tokens_are_those_of_the_documents_with_what_stands_around_them(tmp_path):
    folder = tokens.folder(tmp_path / "tokenizer", begin="<s>")
    data = Data(path=write(tmp_path / "texts", 30).path, tokenizer=str(folder))
    corpus = token_files.load(token_files.prepare(data, tmp_path / "cache"))
    tokenizer = load_tokenizer(folder)
    (end,), (begin,) = tokenizer.end, tokenizer.begin
    assert corpus.train.dtype == np.uint16
    found = []
    for part in corpus.parts.values():
        pieces = np.split(part.tokens, part.ends)
        assert pieces.pop().size == 0 and all(piece[0] == begin for piece in pieces)
        assert [piece[-1] == end for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        found += [tokenizer.decode(piece) for piece in pieces]
    assert sorted(found) == sorted(f"words of text {number}" for number in range(30))
    assert corpus.record["vocab"] == tokenizer.vocab and corpus.record["documents"] == 30
    plain = token_files.load(token_files.prepare(Data(path=data.path), tmp_path / "cache"))
    assert plain.record["sha256"] != corpus.record["sha256"]


def test_answers_are_marked_token_by_token(tmp_path):
    folder = tokens.folder(tmp_path / "tokenizer", template=tokens.TEMPLATE)
    chats = [
        [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": f"caf\u00e9 {n}"}]
        for n in range(20)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"chat": chat}) for chat in chats))
    data = Data(path=str(tmp_path / "a.jsonl"), column="chat", tokenizer=str(folder), packed=True)
    corpus = token_files.load(token_files.prepare(data, tmp_path / "cache"))
    tokenizer, found = load_tokenizer(folder), []
    for part in corpus.parts.values():
        for piece, asked in zip(
            np.split(part.tokens, part.ends), np.split(part.asked, part.ends), strict=True
        ):
            if piece.size:
                assert asked[-1] and piece[-1] == tokenizer.end[0]
                found.append(tokenizer.decode(piece[asked]))
    assert sorted(found) == sorted(f"caf\u00e9 {n}" for n in range(20))


def test_a_corpus_is_tokenized_once_and_again_where_anything_changed(tmp_path, monkeypatch):
    written, write_tokens = [], tokenizing.write
    monkeypatch.setattr(
        tokenizing, "write", lambda *args: written.append(args[0]) or write_tokens(*args)
    )
    data, cache = write(tmp_path / "texts", 5), tmp_path / "cache"
    first = token_files.prepare(data, cache)
    assert token_files.prepare(data, cache) == first and len(written) == 1
    (tmp_path / "texts" / "0.txt").write_text("other words")
    second = token_files.prepare(data, cache)
    assert second != first and len(written) == 2
    assert token_files.prepare(Data(path=data.path, validation_fraction=0.5), cache) != second
    assert len(written) == 3 and len([*cache.iterdir()]) == 3


def test_what_cannot_be_tokenized_leaves_nothing_behind(tmp_path):
    data = write(tmp_path / "texts", 3)
    (tmp_path / "texts" / "z.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        token_files.prepare(data, tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_two_runs_may_write_the_same_at_once(tmp_path, monkeypatch):
    data, write_tokens = write(tmp_path / "texts", 3), tokenizing.write

    def late(*args):
        monkeypatch.setattr(tokenizing, "write", write_tokens)
        token_files.prepare(data, tmp_path / "cache")
        return write_tokens(*args)

    monkeypatch.setattr(tokenizing, "write", late)
    corpus = token_files.load(token_files.prepare(data, tmp_path / "cache"))
    assert corpus.record["documents"] == 3 and len([*(tmp_path / "cache").iterdir()]) == 1


@pytest.mark.parametrize("name", ["corpus.json", "train.ends"])
def test_files_of_another_user_are_not_damaged(tmp_path, monkeypatch, name):
    made = token_files.prepare(write(tmp_path / "texts", 3), tmp_path / "cache")

    def guarded(path, opened=checks.open_file):
        if path == made / name:
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(checks, "open_file", guarded)
    with pytest.raises(ValueError, match=r"is closed: .*denied.*; write another --data.cache"):
        token_files.load(made)


def test_texts_and_chats_are_not_mixed_and_chats_are_packed(tmp_path):
    folder = tokens.folder(tmp_path / "tokenizer", template=tokens.TEMPLATE)
    lines = [{"x": [{"role": "user", "content": "a"}]}, {"x": "text"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"path": str(tmp_path / "a.jsonl"), "column": "x", "tokenizer": str(folder)}
    with pytest.raises(ValueError, match="has texts and chats"):
        token_files.prepare(Data(**data, packed=True), tmp_path)
    with pytest.raises(ValueError, match="holds chats, which are trained on whole; write --data.p"):
        token_files.prepare(Data(**data), tmp_path)


def test_the_only_document_of_tokens_has_its_end_held_out(tmp_path):
    folder = tokens.folder(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text("some words of a text " * 50)
    data = Data(path=str(tmp_path / "a.txt"), tokenizer=str(folder))
    corpus = token_files.load(token_files.prepare(data, tmp_path / "cache"))
    text = load_tokenizer(folder).decode([*corpus.train, *corpus.validation])
    assert text == "some words of a text " * 50
    size = corpus.train.size + corpus.validation.size
    assert corpus.train.size == round(0.9 * size)
    assert corpus.parts["train"].ends.tolist() == [corpus.train.size]


@pytest.mark.parametrize("kind", ["one file", "rows"])
def test_nothing_is_read_whole_into_memory(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("train.data.files._PIECE", 1 << 14)
    monkeypatch.setattr(tokenizing, "_MOST", (1 << 14, 100))
    size, line = 3 << 20, "words of a long text, again and again, and again\n"
    file = tmp_path / ("a.txt" if kind == "one file" else "a.jsonl")
    with file.open("w") as out:
        for number in range(size // (100 * len(line))):
            text = f"{number} {100 * line}"
            out.write(text if kind == "one file" else json.dumps({"text": text}) + "\n")
    data = Data(path=str(file))
    tracemalloc.start()
    try:
        corpus = token_files.load(token_files.prepare(data, tmp_path / "cache"))
        rows = [texts.batch(corpus.train, 0, step, 8, 64) for step in range(4)]
        assert tracemalloc.get_traced_memory()[1] < size / 3
    finally:
        tracemalloc.stop()
    assert corpus.train.size > size / 2 and np.all(np.array(rows) < 128)


def test_a_cache_that_cannot_be_made_is_named_with_what_to_write(tmp_path):
    data = Data(path=write(tmp_path / "texts", 3).path)
    (tmp_path / "file").touch()
    told = f"cannot make {tmp_path}/file/data: Not a directory; write .* --runs-dir or --data.cache"
    with pytest.raises(OSError, match=told):
        token_files.prepare(data, tmp_path / "file" / "data")
