"""What processes keep for each other: parts of a state, their names, and a folder's notes."""

import json
import os
import types

import numpy as np
import pytest
from hypothesis import strategies as st

from jaxcomp.launch import claims, copies, holders, parts
from jaxcomp.launch.exits import Transient
from tests.helpers.fuzzing import LEAVES, TEXT, fuzz, objects, refused, texts, trees

ENTRIES = [["w", "float32", [[0, 2], [1, 4]]], ["b", "bfloat16", [[3, 5]]], ["n", "int32", []]]
PART = {"entries": ENTRIES, "record": {"leaves": {"w": "float32[2,3]"}, "run": {"step": 3}}}
NUMBERS = bytes(2 * 3 * 4 + 2 * 2 + 4)
DTYPES = st.sampled_from(["object", "O", "U9", "datetime64[ns]", "V8", "float64", "key<fry>", ""])


@st.composite
def wrong_parts(draw):
    """Descriptions of a part with a dtype or spans of no array, then any number of bytes."""
    made = draw(objects(PART))
    if draw(st.booleans()):
        rows = [[name, draw(DTYPES), spans] for name, _, spans in ENTRIES]
        made = PART | {"entries": rows}
    return made, draw(st.sampled_from([NUMBERS, b"", NUMBERS + b"0"]))


def read_part(path, line, numbers):
    path.write_bytes(line + b"\n" + numbers)
    found = refused(parts.read, path)
    for entry, data in found[0] if found else []:
        assert data.dtype.kind != "O" and data.shape == entry.shape
        np.array(data).tobytes()  # its bytes are there
    return found


@fuzz(wrong_parts())
def test_described_parts(tmp_path, made):
    read_part(tmp_path / "part", json.dumps(made[0]).encode(), made[1])


@fuzz(texts(json.dumps(PART), st.sampled_from(["entries", "record"])))
def test_parts(tmp_path, text):
    read_part(tmp_path / "part", text, NUMBERS)


def test_a_good_part_is_read_and_one_with_pointers_is_not(tmp_path):
    found, record = read_part(tmp_path / "part", json.dumps(PART).encode(), NUMBERS)
    assert [entry.path for entry, _ in found] == ["w", "b", "n"] and record == PART["record"]
    for dtype in ("object", "O", "U9", "datetime64[ns]", "key<fry>"):
        rows = [["w", dtype, [[0, 2], [1, 4]]]]
        line = json.dumps(PART | {"entries": rows}).encode()
        assert read_part(tmp_path / "part", line, b"") is None


CODE = "0" * 64
NAMES = st.one_of(
    st.builds(
        "{}-{}-of-{}.{}".format,
        st.one_of(st.integers(0, 9), st.just(10**15)),
        st.one_of(st.just("all"), st.integers(0, 3)),
        st.sampled_from([1, 2, 9_999_999]),
        st.sampled_from([CODE, CODE[1:]]),
    ),
    TEXT,
)


@fuzz(st.lists(st.one_of(trees(), st.fixed_dictionaries({"names": st.lists(NAMES | LEAVES)}))))
def test_lists_of_copies(told):
    held = [each if isinstance(each, dict) else {} for each in told]  # as a board gives them
    found = holders.chosen(held, 0)
    if isinstance(found, holders.Found):
        made = [parts.read_name(name) for name in found.holders]
        assert len(made) == made[0].count + 1 and {it.step for it in made} == {found.step}
    else:
        assert len(found) < 200


@fuzz(texts(json.dumps({"valid": [["a token", 4], ["b", None]]}), st.just("valid")))
def test_notes_of_copies(tmp_path, text):
    (tmp_path / copies._NOTE).write_bytes(text)
    for token, most in copies._valid(tmp_path):
        assert isinstance(token, str) and (most is None or type(most) is int)


SAID = {"process": 4, "host": "h", "since": "2026", "place": ["a", "b", "1"], "done": False}
NOTE = "0" * 32 + "\n" + json.dumps(SAID)


@fuzz(texts(NOTE, st.sampled_from([*SAID])))
def test_notes_of_writers(tmp_path, text):
    note = tmp_path / "1"
    note.write_bytes(text)
    assert isinstance(claims._who(note), str)
    claims._is_alive(note, 1e-3)
    with pytest.raises(Transient, match="another one has taken"):
        claims.Claim(note, "a token that no note has", "now").require()


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_what_is_no_file_among_copies_and_notes_hangs_nobody(tmp_path, kind):
    name = f"3-all-of-1.{CODE}"
    make = os.mkfifo if kind == "fifo" else os.mkdir
    for path in (tmp_path / name, tmp_path / "1"):
        make(path)
    held = types.SimpleNamespace(valid=[("a token", None)])
    assert not copies.Copies._is_valid(held, tmp_path / name)
    with pytest.raises(ValueError, match="needs a file"):
        parts.read(tmp_path / name)
    with pytest.raises(ValueError, match="1 is a .*needs a file"):
        claims._is_alive(tmp_path / "1", 1e-3)
