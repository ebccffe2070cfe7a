"""Rows of each kind of file: all of them, of the column that is asked for, and mistakes by name."""

import json
import os
import tracemalloc

import pytest

from tests.train.data.test_documents import parquet, read_of, texts_of
from train.config import Data
from train.data import documents, rows

TEXTS = [f'row {number} has caf\u00e9, "quotes"\nand lines' for number in range(5)]
ROWS = [{"id": number, "body": text} for number, text in enumerate(TEXTS)]
QUOTED = "".join('{},"{}"\r\n'.format(row["id"], row["body"].replace('"', '""')) for row in ROWS)
LINES = "\n".join(map(json.dumps, ROWS))
FORMS = {
    "a.jsonl": LINES,
    "a.JSONL": LINES,
    "a.ndjson": LINES + "\n\n",
    "lines.json": LINES,
    "array.json": json.dumps(ROWS),
    "indented.json": "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n ",
    "each.json": "\n".join(json.dumps(row, indent=1) for row in ROWS) + "\n",
    "a.csv": "id,body\r\n" + QUOTED,
    "excel.csv": "\ufeffid,body\r\n" + QUOTED + "\r\n",
    "a.tsv": "id\tbody\r\n" + QUOTED.replace(',"', '\t"'),
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_those_of_the_column(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text(FORMS[name], newline="")
    data = Data(path=str(tmp_path / name), column="body")
    assert texts_of(data) == TEXTS
    total, read = read_of(data)
    assert 0.5 * total < read <= total
    monkeypatch.setattr("train.data.files._PIECE", 7)  # pieces end anywhere in a row
    assert texts_of(data) == TEXTS


@pytest.mark.parametrize("text", ["[]", "", " [ \n ] ", "\n"])
def test_a_file_without_rows_has_none(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert texts_of(Data(path=str(tmp_path))) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '[{"text": "a"}, {"text": ', r"row 2 of .*a.json' is not JSON"),
        ("a.json", '[{"text": "a"} {"text": "b"}]', r"row 2 of .* is not JSON \(it lacks ','"),
        ("a.json", '[{"text": "a"},]', r"row 2 of .* is not JSON \(it begins with '\]'"),
        ("a.json", '[{"text": "a"}] more', "goes on after its array"),
        ("a.json", '{"text": "a"}, {"text": "b"}', "row 2 of .* needs an array of objects, or an"),
        ("a.json", '[["text"]]', r"row 1 of .* is not JSON \(it begins with '\[\"text\""),
        ("a.json", '[{"text": ' + "[" * 60_000, "row 1 of .* is not JSON .it nests too deeply"),
        (
            "a.json",
            '{"data": [{"text": "a"}]}',
            r"no field data.column='text'; write one of .'data",
        ),
        ("a.jsonl", '{"text": "a"}\n{"text"', r"line 2 of .*a.jsonl' is not JSON"),
        ("a.jsonl", "[" * 100_000, r"line 1 of .*a.jsonl' is not JSON"),
        ("a.jsonl", '{"body": "a"}', r"no field data.column='text'; write one of \['body'\]"),
        ("a.jsonl", '["text"]', r"holds \['text'\]; needs an object, as .\"text\": "),
        ("a.jsonl", '{"text": 3}', "holds 3; choose one of strings, or of messages"),
        ("a.jsonl", '{"text": [1, 2]}', r"holds \[1, 2\]; choose one of strings"),
        ("a.jsonl", '{"text": []}', r"holds \[\]; choose one of strings"),
        ("a.csv", "id,body\n1,a\n", r"data.column='text' is not one column of .*\['id', 'body'\]"),
        ("a.csv", "", r"data.column='text' is not one column of .*a.csv'; write one of \[\]"),
        ("a.csv", "text,text\na,b\n", "data.column='text' is not one column"),
        ("a.csv", "id,text\n1,a\n2\n", "line 3 of .* has 1 fields, but the first row names 2"),
        ("a.csv", 'id,text\n1,"a\n', "a.csv' is not CSV .unexpected end of data"),
        ("a.csv", 'id,text\n1,"a"b\n', "line 2 of .*a.csv' is not CSV"),
        ("a.csv", b"id,text\n1,\xff\n", "a.csv' is not UTF-8 text"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1 of .*a.jsonl' is not UTF-8 text"),
        ("a.json", b'[{"text": "\xff"}]', r"a.json' is not UTF-8 text \(byte 11\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        texts_of(Data(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_row_that_would_fill_memory_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(rows, "_MOST", 1000)
    monkeypatch.setattr("train.data.files._PIECE", 100)
    begin = "text\n" if name == "a.csv" else '{"text": "'
    (tmp_path / name).write_text(begin + "x" * 10**6)
    with pytest.raises(ValueError, match=f"{name}' (has 1000 characters or more|is not JSON)"):
        texts_of(Data(path=str(tmp_path)))


def test_an_array_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.files._PIECE", 1 << 14)
    many = [{"text": "words of a text " * 60} for _ in range(3000)]
    (tmp_path / "a.json").write_text(json.dumps(many))
    source = documents.find(Data(path=str(tmp_path)))
    tracemalloc.start()
    try:
        assert sum(1 for _ in source.documents()) == 3000
        assert tracemalloc.get_traced_memory()[1] < source.total / 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["gz", "xz", "zst", "bz2", "ZIP"])
def test_compressed_files_are_refused(tmp_path, suffix):
    (tmp_path / f"a.jsonl.{suffix}").write_text("as if")
    with pytest.raises(ValueError, match=f"a.jsonl.{suffix}' is compressed, which is not read"):
        documents.find(Data(path=str(tmp_path)))


def test_a_column_without_rows_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for path, found in ((tmp_path, r"\['.txt'\]"), (None, r"\['.py'\]")):
        data = Data(path=path and str(path), column="body")
        with pytest.raises(ValueError, match=rf"data.column='body' names .* has only {found}"):
            documents.find(data)
    (tmp_path / "b.csv").write_text("body\nrow\n")
    assert texts_of(Data(path=str(tmp_path), column="body")) == ["text", "row"]


def test_chats_of_tables_have_no_keys_that_their_rows_did_not_have(tmp_path):
    import datasets

    call = {"name": "add", "arguments": {"a": 1}}
    chats = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}],
        [{"role": "tool", "name": "add", "content": [{"type": "text", "text": "b"}]}],
        [{"role": "user", "content": "b", "extra": {"deep": [{"x": 1}, {"y": 2}]}}],
    ]
    chats[1][0]["content"] = "c"
    parquet(tmp_path / "a.parquet", chats, "messages")
    parquet(tmp_path / "set.parquet", chats, "messages")
    table = datasets.Dataset.from_parquet(
        str(tmp_path / "set.parquet"), cache_dir=str(tmp_path / ".cache")
    )
    table.save_to_disk(tmp_path / "set")
    lines = "\n".join(json.dumps({"messages": chat}, sort_keys=True) for chat in chats)
    (tmp_path / "a.jsonl").write_text(lines)
    of = lambda name: texts_of(Data(path=str(tmp_path / name), column="messages"))
    sort = lambda texts: [json.dumps(json.loads(text), sort_keys=True) for text in texts]
    assert (
        sort(of("a.parquet"))
        == sort(of("set"))
        == sort(of("a.jsonl"))
        == sort(map(json.dumps, chats))
    )


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATS = [[{"role": "user", "content": text}] for text in "abcd"]
TOOLS = [json.dumps([TOOL]), None, "", "[]"]
"""A table's text of them, and two forms of none; the last row has a list, which is empty."""


def write_chats_with_tools(folder):
    import datasets
    import pyarrow.parquet

    rows = [{"chat": chat, "functions": each} for chat, each in zip(CHATS, TOOLS, strict=True)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    datasets.Dataset(table).save_to_disk(folder / "set")
    lists = [{**row, "functions": json.loads(row["functions"] or "null")} for row in rows]
    del lists[1]["functions"]  # as lines of JSON may
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lists)))


@pytest.mark.parametrize("name", ["a.parquet", "set", "a.json", "a.jsonl"])
def test_tools_of_a_chat_are_a_field_of_its_row(tmp_path, name):
    write_chats_with_tools(tmp_path)
    data = Data(path=str(tmp_path / name), column="chat", tools="functions")
    expected = [
        {"messages": CHATS[0], "tools": [TOOL]}, CHATS[1], CHATS[2],
        {"messages": CHATS[3], "tools": []},
    ]  # fmt: skip
    assert [*map(json.loads, texts_of(data))] == expected
    plain = Data(path=data.path, column="chat")
    assert [*map(json.loads, texts_of(plain))] == CHATS
    assert documents.find(data).fingerprint != documents.find(plain).fingerprint


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[{", r"row 1 of .* has tools that are not JSON \(.*\): \[{"),
        ("[" * 100_000, "row 1 of .* has tools that are not JSON"),
        (
            '{"name": "f"}',
            r"row 1 .* has the tools '{\"name.*; needs a list of JSON schemas",
        ),
        ('["f"]', r"has the tools '\[\"f\"\]'; needs a list of JSON schemas"),
    ],
)
def test_tools_that_are_no_schemas_are_refused(tmp_path, tools, message):
    row = {"text": CHATS[0], "tools": tools}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=message):
        texts_of(Data(path=str(tmp_path), tools="tools"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.jsonl", "no chat of .* has the field data.tools='tool'; write the name of the field"),
        ("a.parquet", r"data.tools='tool' is not one column of .*\['chat', 'functions'\]"),
        ("set", r"data.tools='tool' is not one column of .*set'; write one of \['chat', 'fu"),
    ],
)
def test_a_field_of_tools_that_no_row_has_is_refused(tmp_path, name, message):
    write_chats_with_tools(tmp_path)
    with pytest.raises(ValueError, match=message):
        texts_of(Data(path=str(tmp_path / name), column="chat", tools="tool"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_what_is_no_file_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}' is no file"):
        documents.find(Data(path=str(tmp_path)))
    if name in ("a.jsonl", "a.json", "a.csv", "a.parquet"):  # and where it became one later
        with pytest.raises(ValueError, match=f"{name}.* is (a FIFO|no file)"):
            list(rows.KINDS[(tmp_path / name).suffix](tmp_path / name, "text"))


def saved(tmp_path, **changes):
    """The folder of a saved set, whose state.json says something else."""
    import datasets

    made = datasets.Dataset.from_dict({"text": TEXTS})
    made.save_to_disk(tmp_path / "set")
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "both")
    file = tmp_path / "set" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_data_files": [{"filename": "../other.arrow"}]}, "names the file '../other.arrow', els"),
        ({"_data_files": [{"filename": "/dev/zero"}]}, "names the file '/dev/zero', elsewhere"),
        ({"_data_files": [{}]}, "names the file '.', elsewhere"),
        ({"_data_files": [{"filename": "gone"}]}, "gone' cannot be read"),
        ({"_data_files": "text"}, "_data_files is 'text'"),
        ({"_fingerprint": None}, "_fingerprint is None"),
    ],
)
def test_a_saved_set_names_files_of_its_own(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"cannot be loaded: .*{message}"):
        documents.find(Data(path=str(saved(tmp_path, **change))))


@pytest.mark.parametrize("change", [{"_format_columns": []}, {"_format_type": "numpy"}])
def test_the_format_of_a_saved_set_changes_nothing(tmp_path, change):
    assert texts_of(Data(path=str(saved(tmp_path, **change)))) == TEXTS


def test_a_saved_set_that_is_damaged_is_refused(tmp_path):
    folder = saved(tmp_path)
    (file,) = folder.glob("*.arrow")
    content = bytearray(file.read_bytes())
    place = content.index(b"row 0")
    content[place - 64 : place] = b"\x7f" * 64  # where the texts begin and end
    file.write_bytes(content)
    with pytest.raises(ValueError, match="damaged|cannot be loaded"):
        texts_of(Data(path=str(folder)))
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "both" / "train" / name).write_text("[" * 60_000)
        with pytest.raises(ValueError, match="cannot be loaded"):
            texts_of(Data(path=str(tmp_path / "both")))
    os.remove(tmp_path / "both" / "train" / "dataset_info.json")
    os.mkfifo(tmp_path / "both" / "train" / "dataset_info.json")
    with pytest.raises(ValueError, match="cannot be loaded"):
        texts_of(Data(path=str(tmp_path / "both")))
