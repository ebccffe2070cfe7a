"""Files go from process to process under the run's seal, whole or not at all."""

import hashlib
import json
import socket
import threading

import pytest

from jaxcomp.launch import addresses, handing, seals
from tests.helpers.launching import until

KEY, OTHER = seals.session(b"a secret of the run", "1"), seals.session(b"another secret", "1")
DATA = bytes(range(256)) * 20_000  # several pieces


@pytest.fixture
def served(tmp_path):
    """Two folders, of which the second one is served, and stores for files named by their bytes."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    def store_of(folder):
        known = lambda name: "/" not in name and (folder / name).is_file()
        return handing.FileStore(
            room=lambda name, size: folder if "/" not in name and size <= len(DATA) else None,
            find=lambda name: folder / name if known(name) else None,
            is_good=lambda name, digest: name == digest[:16],
        )

    with handing.serve_files("127.0.0.1", KEY, store_of(there), 20.0) as address:
        yield address, here, there, store_of


def named(folder, data=DATA, name=None):
    file = folder / (name or hashlib.sha256(data).hexdigest()[:16])
    file.write_bytes(data)
    return file


def test_a_file_is_kept_by_another_process_and_given_back(served):
    address, here, there, store_of = served
    file = named(here)
    handing.put(address, KEY, file, 20.0)
    assert (there / file.name).read_bytes() == DATA
    file.unlink()
    assert handing.get(address, KEY, file.name, store_of(here), 20.0) == file
    assert file.read_bytes() == DATA


@pytest.mark.parametrize("key", [OTHER, b""])
def test_who_lacks_the_key_puts_and_gets_nothing(served, key):
    address, here, there, store_of = served
    file, kept = named(here, b"of a stranger"), named(there, b"of the run")
    with pytest.raises(OSError):
        handing.put(address, key, file, 5.0)
    with pytest.raises(OSError):
        handing.get(address, key, kept.name, store_of(here), 5.0)
    assert list(there.iterdir()) == [kept] and list(here.iterdir()) == [file]


def test_other_bytes_than_those_of_the_name_are_not_kept(served):
    address, here, there, store_of = served
    with pytest.raises(OSError, match="not those of its name"):
        handing.put(address, KEY, named(here, b"changed", "0" * 16), 5.0)
    assert list(there.iterdir()) == []
    bad = named(there, b"changed", "1" * 16)
    with pytest.raises(OSError, match="is not it"):
        handing.get(address, KEY, bad.name, store_of(here), 5.0)
    assert [path.name for path in here.iterdir()] == ["0" * 16]


def test_what_is_too_large_or_not_there_is_refused(served):
    address, here, there, store_of = served
    with pytest.raises(OSError):
        handing.put(address, KEY, named(here, DATA + b"x"), 5.0)
    for name in ("0" * 16, "../here/x"):
        with pytest.raises(OSError, match="it is not there"):
            handing.get(address, KEY, name, store_of(here), 5.0)
    assert list(there.iterdir()) == []


def test_a_file_that_is_cut_off_is_not_kept(served):
    address, here, there, _ = served
    file = named(here)
    with socket.create_connection(addresses.split(address), 5.0) as connection:
        nonce = json.loads(connection.makefile().readline())["nonce"]
        request = json.dumps({"put": file.name, "size": len(DATA), "nonce": "x"})
        connection.sendall(
            seals.seal(KEY, f"request {nonce}", request).encode() + b"\n" + DATA[:-1]
        )
    serving = lambda: any(thread.name.endswith("(serve)") for thread in threading.enumerate())
    until(lambda: not serving(), 10)
    assert list(there.iterdir()) == []


def test_a_request_cannot_be_said_twice(served):
    address, _, there, _ = served
    kept = named(there, b"of the run")
    first = socket.create_connection(addresses.split(address), 5.0)
    second = socket.create_connection(addresses.split(address), 5.0)
    with first, second:
        nonces = [json.loads(each.makefile().readline())["nonce"] for each in (first, second)]
        request = json.dumps({"get": kept.name, "nonce": "x"})
        line = seals.seal(KEY, f"request {nonces[0]}", request).encode() + b"\n"
        first.sendall(line)
        second.sendall(line)
        assert first.makefile("rb").readline() and second.makefile("rb").readline() == b""


def test_who_says_nothing_holds_up_nobody(served, monkeypatch):
    monkeypatch.setattr(handing, "_PATIENCE", 0.2)
    address, here, there, _ = served
    silent = socket.create_connection(addresses.split(address), 5.0)
    with silent:
        file = named(here)
        handing.put(address, KEY, file, 20.0)
        assert (there / file.name).is_file()
        reader = silent.makefile("rb")
        reader.readline()
        assert reader.read() == b""
