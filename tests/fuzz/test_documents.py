"""Files of rows and of text, and saved data sets."""

import functools
import io
import json

import pytest
from hypothesis import strategies as st

from tests.helpers.fuzzing import fuzz, objects, octets, refused, texts, trees
from train.config import Data
from train.data import documents, rows

ROWS = [{"text": "words\n", "chat": [{"role": "user", "content": "a"}]}, {"text": "caf\u00e9"}]
FILES = {
    ".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".ndjson": "".join(json.dumps(row) + "\n" for row in ROWS),
    ".json": json.dumps(ROWS, indent=1),
    ".csv": 'id,text\n1,"words, and\nmore"\n2,caf\u00e9\n',
    ".tsv": "id\ttext\n1\twords\n",
    ".txt": "words of a text\n",
}


def read(folder, name, content, column):
    for file in folder.iterdir():
        file.unlink()
    (folder / name).write_bytes(content)
    for document in documents.find(Data(path=str(folder), column=column)).documents():
        for text, size in document.pieces:
            assert text.encode() is not None and size >= 0
            if document.is_chat:
                assert all(isinstance(message, dict) for message in json.loads(text))


@st.composite
def files(draw):
    suffix = draw(st.sampled_from(sorted(FILES)))
    content = draw(st.one_of(texts(FILES[suffix], st.just("text")), octets(FILES[suffix].encode())))
    return f"a{suffix}", content, "text" if suffix == ".txt" else draw(st.sampled_from(COLUMNS))


COLUMNS = ["text", "chat"]


@fuzz(files())
def test_rows_of_text_files(tmp_path, given):
    refused(read, tmp_path, *given)


@functools.cache
def table():
    import pyarrow
    import pyarrow.parquet

    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS * 4), made)
    return made.getvalue()


@fuzz(st.deferred(lambda: st.tuples(octets(table()), st.sampled_from(COLUMNS))))
def test_rows_of_parquet(tmp_path, given):
    refused(read, tmp_path, "a.parquet", *given)


@fuzz(trees())
def test_values_of_tables_lose_nulls_alone(value):
    found = json.dumps(rows.without_nulls(value))
    assert '": null' not in found and (found == json.dumps(value) or "null" in json.dumps(value))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("saved")
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "set")
    return folder / "set"


STATE = {
    "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
    "_fingerprint": "0" * 16, "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
    "_output_all_columns": False, "_split": None,
}  # fmt: skip
NAMED = {"text": {"dtype": "string", "_type": "Value"}}
CHATS = {"role": NAMED["text"], "content": NAMED["text"]}
INFO = {"features": NAMED | {"chat": {"feature": CHATS, "_type": "List"}}, "citation": ""}


@fuzz(st.one_of(st.tuples(objects(STATE), st.just(INFO)), st.tuples(st.just(STATE), objects(INFO))))
def test_settings_of_saved_sets(saved, given):
    for name, value in zip(("state.json", "dataset_info.json"), given, strict=True):
        (saved / name).write_text(json.dumps(value))
    refused(lambda: list(documents.find(Data(path=str(saved))).documents()))


@pytest.fixture(scope="module")
def arrow(saved):
    (file,) = saved.glob("*.arrow")
    for name, value in (("state.json", STATE), ("dataset_info.json", INFO)):
        (saved / name).write_text(json.dumps(value))
    return file, file.read_bytes()


@fuzz(st.data())
def test_rows_of_saved_sets(saved, arrow, data):
    file, content = arrow
    bad = data.draw(octets(content))
    file.unlink()  # the mapping of the last one stays
    file.write_bytes(bad)
    refused(lambda: list(documents.find(Data(path=str(saved))).documents()))
