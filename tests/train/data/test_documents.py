"""Documents of text files, JSONL, parquet and data sets: all of them, and mistakes by name."""

import json
import os

import pytest

from train.config import Data
from train.data import documents

TEXTS = [f"row {i} has caf\u00e9" for i in range(5)]


def texts_of(data):
    return ["".join(text for text, _ in each.pieces) for each in documents.find(data).documents()]


def read_of(data):
    source = documents.find(data)
    return source.total, sum(n for each in source.documents() for _, n in each.pieces)


def jsonl(file, values, column="text"):
    lines = [json.dumps({"id": i, column: value}) for i, value in enumerate(values)]
    file.write_text("\n".join(lines) + "\n\n")
    return str(file)


def parquet(file, values, column="text"):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({column: values, "id": range(len(values))}), file)
    return str(file)


def test_rows_of_each_kind_are_documents_and_all_of_a_folder_are_read(tmp_path):
    import datasets

    jsonl(tmp_path / "a.jsonl", TEXTS)
    parquet(tmp_path / "b.parquet", TEXTS)
    (tmp_path / "c.txt").write_text("\ufeffa text\nof two lines")  # as from Notepad
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "set")
    for name in ("a.jsonl", "b.parquet", "set"):
        data = Data(path=str(tmp_path / name))
        assert texts_of(data) == TEXTS
        total, read = read_of(data)
        assert 0.5 * total < read <= total
    os.rename(tmp_path / "set", tmp_path / ".set")
    assert texts_of(Data(path=str(tmp_path))) == [*TEXTS, *TEXTS, "a text\nof two lines"]


def test_rows_may_be_chats_and_any_text_of_json(tmp_path):
    chats = [[{"role": "user", "content": f"{text} \ud800"}] for text in TEXTS]
    made = jsonl(tmp_path / "a.jsonl", chats, "messages")
    found = list(documents.find(Data(path=made, column="messages")).documents())
    assert all(each.is_chat for each in found) and len({each.name for each in found}) == 5
    assert json.loads(next(found[1].pieces)[0])[0]["content"] == f"{TEXTS[1]} ?"


def test_the_fingerprint_sees_sizes_times_and_names(tmp_path):
    made = Data(path=jsonl(tmp_path / "a.jsonl", TEXTS))
    prints = [documents.find(made).fingerprint for _ in range(2)]
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    prints.append(documents.find(made).fingerprint)
    prints.append(documents.find(Data(path=made.path, column="id")).fingerprint)
    assert prints[0] == prints[1] and len(set(prints)) == 3


@pytest.mark.parametrize("newline", ["\n", ""])
def test_long_files_come_in_pieces_that_lose_nothing(tmp_path, monkeypatch, newline):
    monkeypatch.setattr("train.data.files._PIECE", 20 if newline else 7)
    text = newline.join(f"caf\u00e9 {i} \U0001f642" for i in range(20))
    (tmp_path / "a.txt").write_text(text)
    (only,) = documents.find(Data(path=str(tmp_path))).documents()
    pieces = [piece for piece, _ in only.pieces]
    assert "".join(pieces) == text and len(pieces) > 10 and max(map(len, pieces)) < 40
    assert not newline or all(piece.endswith("\n") for piece in pieces[:-1])


@pytest.mark.parametrize(("at", "bad"), [(0, b"\xff"), (9, b"\xe9a"), (22, b"\xe2\x82")])
def test_the_byte_that_is_no_text_is_named(tmp_path, monkeypatch, at, bad):
    monkeypatch.setattr("train.data.files._PIECE", 7)
    (tmp_path / "a.txt").write_bytes(b"x" * at + bad)
    with pytest.raises(ValueError, match=rf"a.txt' is not UTF-8 text \(byte {at}\)"):
        texts_of(Data(path=str(tmp_path)))


def test_parquet_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"'text' is not one column of .*a.parquet'; write one of"):
        texts_of(Data(path=parquet(tmp_path / "a.parquet", TEXTS, "body")))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"b.parquet' cannot be read as parquet"):
        texts_of(Data(path=str(tmp_path / "b.parquet")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[huggingface\]'"):
        texts_of(Data(path=str(tmp_path / "a.parquet")))
