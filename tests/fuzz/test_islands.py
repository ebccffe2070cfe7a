"""What others write into a run: it is read as a message, or refused in one line."""

import json

from hypothesis import strategies as st

from jaxcomp.islands import envelopes, runs
from jaxcomp.islands.courier import _DECISION, _HEADER
from tests.helpers.fuzzing import TEXT, fuzz, objects, octets, refused

KEY, PATH = b"of a run", "rounds/00000000/a.00000000"
GOOD = {"name": "a", "fence": 0, "round": 0, "tokens": 8, "consensus": "00ff"}
MEMBERS = {"round": 0, "members": [["a", 0, "00"]], "left_out": {"b": "x"}, "consensus": "00",
           "saves": ""}  # fmt: skip


def read(data):
    header, payload, _ = envelopes.opened(KEY, PATH, data, envelopes.HEADER, 12)
    assert len(payload) == 12
    return envelopes.checked(header, _HEADER)


@fuzz(octets(envelopes.sealed(KEY, PATH, GOOD, bytes(12))))
def test_objects_of_strangers(data):
    """Without the key nobody changes a byte of it."""
    found = refused(read, data)
    assert found is None or data == envelopes.sealed(KEY, PATH, GOOD, bytes(12))


@fuzz(st.tuples(st.one_of(st.just(GOOD), objects(GOOD)), st.binary(min_size=10, max_size=14)))
def test_objects_of_members(given):
    """Whoever has the key writes any header and payload; what is read is in range."""
    header, payload = given
    found = refused(read, envelopes.sealed(KEY, PATH, header, payload))
    if found is not None:
        assert found["tokens"] >= 1 and found["fence"] >= 0
        assert envelopes.NAME.fullmatch(found["name"]) and len(payload) == 12


@fuzz(st.binary(max_size=300))
def test_headers_of_members(text):
    body = text + b"\n" + bytes(12)
    digest = envelopes._digest(KEY, PATH, body)
    refused(read, envelopes._MAGIC + digest + b"\n" + body)
    refused(read, envelopes._MAGIC + digest + b"\n" + b"[" * 4000 + b"\n" + bytes(12))


@fuzz(st.one_of(st.just(MEMBERS), objects(MEMBERS)))
def test_decisions(header):
    header = json.loads(json.dumps(header))
    found = refused(envelopes.checked, header, _DECISION)
    if found is not None:
        good = lambda name, fence: 0 <= fence < 10**8 and envelopes.NAME.fullmatch(name)
        assert all(good(name, fence) for name, fence, _ in found["members"])


PATHS = ["claims/a.00000000", "claims/a.00000001.left", "rounds/00000000/members", PATH]


@fuzz(st.lists(st.one_of(TEXT, st.sampled_from([*PATHS, "snapshots/00000003", "claims/a"]))))
def test_names_of_objects(paths):
    view = runs.view_of(paths)
    assert view.left <= set(view.fences) <= {"a"} and set(view.rounds) <= {0}
    assert set(view.snapshots) <= {3}
    assert view.rounds.get(0, set()) <= {"members", "a.00000000"}
