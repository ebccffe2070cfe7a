"""Addresses, and what processes say to each other."""

import json

from hypothesis import strategies as st

from jaxcomp.launch import addresses, seals
from tests.helpers.fuzzing import TEXT, fuzz, refused, texts


@fuzz(st.one_of(TEXT, st.sampled_from(["[::1]:80", "h:99999", ":", "h:١"])))
def test_addresses(text):
    if (found := refused(addresses.split, text)) is not None:
        assert 0 < found[1] < 2**16


@fuzz(texts(json.dumps({"process": 1, "of": 2, "on": "h", "nonce": "0" * 32})))
def test_what_comes_to_the_rendezvous(line):
    text = line.decode(errors="replace")
    assert seals.unseal(b"a secret of a run", "hello", text) is None
    seals.json_object(text)
