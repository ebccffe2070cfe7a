"""Sealed objects: what is changed, cut or moved is refused, before anything is made of it."""

import numpy as np
import pytest

from jaxcomp.islands import envelopes

KEY, PATH = envelopes.key_of("sixteen letters!"), "rounds/00000000/a.00000000"
DATA = envelopes.sealed(KEY, PATH, {"name": "a"}, b"payload")


def test_an_object_comes_back():
    header, payload = envelopes.opened(KEY, PATH, DATA, payload=7)
    assert header == {"name": "a"} and bytes(payload) == b"payload"
    assert len(DATA) in envelopes.sizes_of(7) and envelopes.digest_of(DATA).encode() in DATA


@pytest.mark.parametrize(
    ("key", "path", "data", "text"),
    [
        (KEY, PATH, DATA[:-1], "another digest"),
        (KEY, PATH, DATA.replace(b'"a"', b'"b"'), "another digest"),
        (KEY, PATH.replace("0", "1"), DATA, "another digest"),
        (b"", PATH, DATA, "sealed with another secret"),
        (KEY, PATH, b"x" + DATA, "no object of islands"),
        (KEY, PATH, b"", "no object of islands"),
        (KEY, PATH, envelopes.sealed(KEY, PATH, {"name": "a"}, b"pay"), "3 bytes of payload"),
        (KEY, PATH, envelopes.sealed(KEY, PATH, {"n": "a" * 5000}, b"payload"), "at most 4096"),
        (KEY, PATH, envelopes.sealed(KEY, PATH, [1], b"payload"), "no object"),
    ],
)
def test_what_is_not_of_this_run_is_refused(key, path, data, text):
    with pytest.raises(ValueError, match=text):
        envelopes.opened(key, path, data, payload=7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("tokens", 2**53),
        ("tokens", True),
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("fence", -1),
        ("name", "../a"),
        ("consensus", "xyz"),
        ("round", 1.5),
    ],
)
def test_fields_out_of_range_are_named(field, value):
    good = {"name": "a", "fence": 0, "round": 0, "tokens": 1, "seconds": 0.0, "consensus": "00"}
    assert envelopes.message_of(good).tokens == 1
    with pytest.raises(ValueError, match=f"has {field}="):
        envelopes.message_of({**good, field: value})


def test_numbers_of_a_payload_are_finite():
    payload = memoryview(np.array([1, np.inf], np.float16).tobytes())
    envelopes.require_finite(payload, (envelopes.Floats(0, np.float16, 1),))
    with pytest.raises(ValueError, match="from byte 2"):
        envelopes.require_finite(payload, (envelopes.Floats(2, np.float16, 1),))
