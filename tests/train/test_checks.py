"""Files that a user can change, opened and read without a hang."""

import os
import socket
import tracemalloc

import pytest

from train import checks


def test_a_regular_file_is_opened_and_read_through_a_link_too(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with checks.open_file(tmp_path / name) as file:
            assert file.read(2) == b"te"
        assert checks.read_file(tmp_path / name) == b"text"
    with pytest.raises(FileNotFoundError):
        checks.read_file(tmp_path / "none")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    cases = [(tmp_path / "fifo", "FIFO"), (tmp_path / "link", "FIFO"), (tmp_path, "folder")]
    for path, kind in [*cases, ("/dev/zero", "device")]:
        with pytest.raises(ValueError, match=f"{path} is a {kind}; needs a file"):
            checks.open_file(path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="socket"):
            checks.open_file(tmp_path / "socket")
    with pytest.raises(ValueError, match="fifo cannot be read: .* is a FIFO"):
        checks.json_object(tmp_path / "fifo")


def test_a_file_longer_than_what_is_needed_takes_no_memory(tmp_path):
    with open(tmp_path / "long", "wb") as file:
        file.truncate(10**13)
    with pytest.raises(ValueError, match=f"long has {10**13} bytes; needs at most 100000000"):
        checks.read_file(tmp_path / "long")
    with pytest.raises(ValueError, match="needs at most 3"):
        checks.read_file(tmp_path / "long", 3)


def test_a_short_file_takes_as_much_memory_as_it_has(tmp_path):
    (tmp_path / "short").write_text("{}")
    tracemalloc.start()
    try:
        assert checks.json_object(tmp_path / "short") == {}
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_key_that_stands_twice_in_an_object_is_refused():
    assert checks.json_value('{"a": {"b": 1}, "b": 2}') == {"a": {"b": 1}, "b": 2}
    with pytest.raises(ValueError, match="has the key 'b' twice"):
        checks.json_value('{"a": {"b": 1, "b": 1}}')
