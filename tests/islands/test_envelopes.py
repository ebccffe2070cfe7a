"""Sealed objects: what is changed, cut or moved is refused, before anything is made of it."""

import pytest

from jaxcomp.islands import envelopes, store
from jaxcomp.islands.envelopes import HEADER

KEY, PATH = envelopes.key_of("sixteen letters!"), "rounds/00000000/a.00000000"
DATA = envelopes.sealed(KEY, PATH, {"name": "a"}, b"payload")


def test_a_room_reads_what_it_wrote_and_nothing_of_another_size():
    room = envelopes.Room(store.opened("memory://envelopes"), KEY)
    written = room.write("x", {"name": "a"}, b"payload")
    found = room.read("x", 7)
    assert written[::2] == found[::2] == ({"name": "a"}, found.digest)
    assert bytes(written.payload) == bytes(found.payload) == b"payload" and len(found.digest) == 64
    assert room.write("x", {}) is None
    assert room.read("y") is None
    with pytest.raises(ValueError, match="memory://envelopes: x has .* bytes; needs"):
        room.read("x", 90, HEADER)


@pytest.mark.parametrize(
    ("key", "path", "data", "text"),
    [
        (KEY, PATH, DATA[:-1], "another digest"),
        (KEY, PATH, DATA.replace(b'"a"', b'"b"'), "another digest"),
        (KEY, PATH.replace("0", "1"), DATA, "another digest"),
        (b"", PATH, DATA, "give the run.s secret"),
        (KEY, PATH, b"x" + DATA, "no object of islands"),
        (KEY, PATH, b"", "no object of islands"),
        (KEY, PATH, envelopes.sealed(KEY, PATH, {"name": "a"}, b"pay"), "3 bytes of payload"),
        (KEY, PATH, envelopes.sealed(KEY, PATH, {"n": "a" * 5000}, b"payload"), "at most 4096"),
    ],
)
def test_what_is_not_of_this_run_is_refused(key, path, data, text):
    with pytest.raises(ValueError, match=text):
        envelopes.opened(key, path, data, HEADER, 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("tokens", 2**53),
        ("tokens", True),
        ("fence", -1),
        ("name", "../a"),
        ("consensus", "xyz"),
        ("round", 1.5),
        ("members", [["a", 0, "00"], ["a", 1, "01"]]),
        ("members", [["a", 10**8, "00"]]),
        ("left_out", {"a": 1}),
        ("saves", "../a"),
        ("last", ["a"]),
        ("last", {"a": [0, -2]}),
        ("last", {"a/b": [0, 1]}),
    ],
)
def test_fields_out_of_range_are_named(field, value):
    with pytest.raises(ValueError, match=f"has {field}="):
        envelopes.checked({"name": "a", field: value}, ("name", field))


@pytest.mark.parametrize("header", [[1], {}, {"name": "a", "more": 1}])
def test_a_header_has_its_fields_and_no_others(header):
    good = {"name": "a", "fence": 0, "round": 0, "tokens": 1, "consensus": "00"}
    assert envelopes.checked(good, good) == good
    with pytest.raises(ValueError, match="without name, or with more"):
        envelopes.checked(header, ("name",))
