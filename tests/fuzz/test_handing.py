"""What processes send to each other directly, and leave on their board."""

import json
import socket
import time
from unittest import mock

from hypothesis import strategies as st

from jaxcomp.launch import board, distributed, handing, peers, seals
from tests.helpers.fuzzing import TEXT, fuzz, objects, texts

KEY, NONCE, NAME = b"of this start", "0" * 32, "good"
REQUESTS = [{"put": NAME, "size": 3, "nonce": "1"}, {"get": NAME, "nonce": "1"}]


def store_of(folder):
    """A store that has room for one name of up to nine bytes."""
    (folder / "there").mkdir(exist_ok=True)
    room = lambda name, size: folder / "there" if name == NAME and size < 10 else None
    find = lambda name: next((path for path in folder.iterdir() if path.name == name), None)
    return handing.FileStore(room, find, lambda name, digest: True)


def said(value, sealed, about):
    """A line with a JSON value, or with any bytes."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    line = seals.seal(KEY, about, text.decode(errors="replace")) if sealed else None
    return (line.encode(errors="replace") if sealed else text) + b"\n"


LINES = st.one_of(*map(objects, REQUESTS), *(texts(json.dumps(each)) for each in REQUESTS))


@fuzz(st.tuples(LINES, st.booleans(), st.binary(max_size=12)))
def test_requests(tmp_path, given):
    """A caller gets one answer at most, and only the file of its name is written."""
    value, sealed, rest = given
    (tmp_path / NAME).write_bytes(b"abc")
    caller, own = socket.socketpair()
    with caller, own, mock.patch.object(handing.secrets, "token_hex", lambda size: NONCE):
        caller.sendall((said(value, sealed, f"request {NONCE}") + rest)[:60_000])
        caller.shutdown(socket.SHUT_WR)
        try:
            handing._serve(own, KEY, store_of(tmp_path), 2.0)
        except OSError:  # which ends the caller's thread
            pass
        own.shutdown(socket.SHUT_WR)  # closing would reset what it has not read
        answer = b"".join(iter(lambda: caller.recv(4096), b""))
    assert answer.count(b"\n") <= 2 and (sealed or answer.count(b"\n") == 1)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "there"}
    assert {path.name for path in (tmp_path / "there").iterdir()} <= {NAME}


ANSWERS = st.one_of(objects({"size": 3}), objects({"problem": ""}), texts(json.dumps({"size": 3})))


@fuzz(st.tuples(st.one_of(TEXT, st.just("h:1")), ANSWERS, st.booleans(), st.binary(max_size=12)))
def test_answers(tmp_path, given):
    """Whoever answers, a file is there if it was sent; else there is an OSError."""
    to, value, sealed, rest = given
    theirs, own = socket.socketpair()
    connect = lambda address, timeout: own
    with (
        theirs,
        mock.patch.object(handing.secrets, "token_hex", lambda size: NONCE),
        mock.patch.object(handing.socket, "create_connection", connect),
    ):
        theirs.sendall(b'{"nonce": 3}\n' + (said(value, sealed, f"answer {NONCE}") + rest)[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        for call in (
            lambda: handing.get(to, KEY, NAME, store_of(tmp_path), 2.0),
            lambda: handing.put(to, KEY, tmp_path / "there" / NAME, 2.0),
        ):
            try:
                found = call()
                assert found is None or found.stat().st_size < 10
            except OSError:
                pass
        own.close()


class Client:
    """A coordination service, where anybody writes."""

    def __init__(self, written):
        self.written = written

    def key_value_dir_get(self, folder):
        return [(f"{folder}/{name}", text) for name, text in self.written]


PLACES = st.sampled_from(["0", "1", "2", "-1", "01", "x", ""])
WRITTEN = st.one_of(
    TEXT, st.sampled_from(["3 SIGTERM", "1 2 a step", "75 gone", "0 done", "9" * 5000, "[" * 9000])
)


@fuzz(st.lists(st.tuples(PLACES, WRITTEN), max_size=4))
def test_boards(written):
    """Nothing counts that has no seal; without seals a text counts for its form."""
    assert board.for_client(Client(written), 0, 2, KEY).look("life") == {}
    texts = board.for_client(Client(written), 0, 2, b"")
    found = texts.look("life")
    assert found.keys() <= {0, 1}
    lost, behind = peers._lost(0, 2, texts, {1: ("", 1)}, 0.0)
    assert len(lost + behind) < 500
    for text in found.values():
        assert peers._failure(text.partition(" ")[0]) != 0
        assert peers._BEGUN.fullmatch(text) is None or int(peers._BEGUN.fullmatch(text)[1]) >= 0
    began = time.monotonic()
    try:
        distributed.answers(texts, "life", [0, 1], 0.0)
    except ConnectionError:
        pass
    assert time.monotonic() - began < 2


@fuzz(st.lists(st.dictionaries(TEXT, TEXT, max_size=3), min_size=1, max_size=3))
def test_facts_that_differ(facts):
    assert bool(distributed.differences(facts)) == any(fact != facts[0] for fact in facts)
