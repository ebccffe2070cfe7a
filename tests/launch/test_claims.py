"""A run folder has one writer; who was replaced writes nothing more, also after a long sleep."""

import concurrent.futures
import errno
import json
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxcomp.launch import agree, claims
from jaxcomp.launch.exits import Transient
from tests.helpers.launching import piped, until
from train.checkpoints import files
from train.checkpoints.store import open_checkpoints
from train.output import metrics

LEASE = 0.5

PROGRAM = """
import itertools, os, pathlib, signal, sys, time
from jaxcomp.launch import claims
from train.output import metrics
from jaxcomp.launch.exits import clean_exits

signal.signal(signal.SIGINT, signal.default_int_handler)  # behind "&" shells ignore it
folder = pathlib.Path(sys.argv[1])
with clean_exits(), claims.claimed(folder, {lease}) as claim:
    print("here", flush=True)
    for step in itertools.count():
        metrics.append(folder / "metrics.jsonl", {{"step": step}}, claim.require)
        time.sleep(0.02)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that writes rows into the folder."""
    with piped(PROGRAM.format(lease=LEASE), str(tmp_path)) as process:
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def neither_links_nor_locks(monkeypatch):
    def refuse(*args, **options):
        raise OSError("not on this file system")

    for name in ("link", "symlink", "lockf"):
        monkeypatch.setattr(os, name, refuse)


def notes(folder):
    return sorted(path.name for path in (folder / "writer").iterdir())


def test_who_comes_second_hears_who_is_there_and_since_when(tmp_path, other):
    since = json.loads((tmp_path / "writer" / "1").read_text().partition("\n")[2])["since"]
    began = time.monotonic()
    with pytest.raises(Transient) as error, claims.claimed(tmp_path, 60 * LEASE):
        raise AssertionError("two writers")
    assert time.monotonic() - began < 20 * LEASE  # it does not wait for the end of the lease
    host = os.uname().nodename
    said = f"{tmp_path} has a writer: process {other.pid} on {host}, since {since}. Wait for its"
    assert str(error.value).startswith(said)
    assert other.poll() is None and notes(tmp_path) == ["1"]


def test_who_was_frozen_and_replaced_writes_no_row_more(tmp_path, other):
    log = tmp_path / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count("\n") >= 3)
    other.send_signal(signal.SIGSTOP)
    with claims.claimed(tmp_path, LEASE) as claim:
        metrics.keep_until(log, 1)
        metrics.append(log, {"step": 2, "mine": True}, claim.require)
        other.send_signal(signal.SIGCONT)
        assert other.wait(30) == 75
        assert notes(tmp_path) == ["2"]
        claim.require()
    rows = metrics.read(log)
    assert rows == [{"step": 0}, {"step": 1}, {"step": 2, "mine": True}]
    said = other.stderr.read()
    assert f"another one has taken {tmp_path} over: process {os.getpid()} on " in said


def test_a_file_that_was_opened_before_is_not_written_to_after(tmp_path):
    """Between the look at the note and the write nobody can be replaced unseen."""
    log = tmp_path / "metrics.jsonl"
    metrics.append(log, {"step": 0})

    def replaced_after_it_looked():
        metrics.keep_until(log, 0)

    metrics.append(log, {"step": 1}, replaced_after_it_looked)
    assert metrics.read(log) == [{"step": 0}]


def test_a_folder_that_was_moved_is_told_as_such(tmp_path):
    with claims.claimed(tmp_path / "run", LEASE) as claim:
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(OSError, match="/run was moved or removed while this run wrote there"):
            claim.require()


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_nobody_waits_for_a_writer_that_is_seen_to_be_gone(tmp_path, other, end):
    if end == "killed":
        other.kill()
    else:
        other.send_signal(signal.SIGINT)
    other.wait(30)
    began = time.monotonic()
    with claims.claimed(tmp_path, 60.0) as claim:
        assert claim.note.name == "2" and notes(tmp_path) == ["2"]
    assert time.monotonic() - began < 20.0


def test_a_writer_on_another_host_is_waited_for_as_long_as_its_lease(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(claims, "_place", lambda process: ["another machine", "x", "1"])
        note, token, since = claims._take(tmp_path / "writer", LEASE, "")
    began = time.monotonic()
    with claims.claimed(tmp_path, LEASE):
        assert LEASE <= time.monotonic() - began < 10 * LEASE
        with pytest.raises(Transient, match="It writes nothing more there"):
            claims.Claim(files.Path(note), token, since).require()
    assert "for a sign of process" in capsys.readouterr().err


def test_a_full_disk_is_told_as_such_and_leaves_no_note(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left on device: .*writer/1'"):
            claims._take(tmp_path / "writer", LEASE, "")
    assert notes(tmp_path) == []


def test_of_many_who_come_at_once_one_writes(tmp_path):
    (tmp_path / "writer").mkdir()
    (tmp_path / "writer" / "7").write_text("of somebody who never came further")

    def take(_):
        try:
            return claims._take(tmp_path / "writer", LEASE, "")[0]
        except Transient:
            return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        taken = [note for note in pool.map(take, range(8)) if note]
    # They renew nothing here, so that one may follow the other; what counts is that one is left.
    assert len(taken) == len(set(taken))
    assert notes(tmp_path) == [str(max(int(os.path.basename(note)) for note in taken))]


def replaced(claim):
    """Another run takes the folder over."""
    (claim.note.parent / "9").write_bytes(claim.note.read_bytes().replace(b"a", b"b"))
    claim.note.unlink()


def test_who_was_replaced_saves_nothing_and_removes_nothing(tmp_path):
    directory, tree = tmp_path / "checkpoints", {"x": jnp.arange(4.0)}
    with claims.claimed(tmp_path) as claim:
        checkpoints = open_checkpoints(directory, claim=claim)
        checkpoints.save(1, tree, {})
        checkpoints.wait()
        replaced(claim)
        theirs = directory / "2.orbax-checkpoint-tmp-theirs"
        theirs.mkdir()
        with pytest.raises(Transient, match="taken .* over: process"):
            checkpoints.save(2, tree, {})
        assert files.steps(directory) == [1] and theirs.exists()
        checkpoints.manager.close()


def test_a_save_during_which_another_took_over_is_not_completed(tmp_path):
    directory, tree = tmp_path / "checkpoints", {"x": jnp.arange(4.0)}
    seen = []

    class Frozen(claims.Claim):
        """A claim that is lost while Orbax's thread writes."""

        def require(self):
            if threading.current_thread() is not threading.main_thread() and not seen:
                seen.extend(path.name for path in directory.iterdir())
                replaced(self)
            super().require()

    with claims.claimed(tmp_path) as claim:
        checkpoints = open_checkpoints(directory, claim=Frozen(*claim))
        checkpoints.save(1, tree, {})
        with pytest.raises(Transient, match="writes nothing more"):
            checkpoints.wait()
        assert seen == [f"1.orbax-checkpoint-tmp-{claim.token[:8]}"]
        assert files.steps(directory) == []
        checkpoints.manager.close()


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    told = f"cannot make {folder}/writer: Not a directory; write another --runs-dir"
    with pytest.raises(OSError, match=told):
        claims.claimed(folder, instead="write another --runs-dir").__enter__()


def test_a_shared_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agree, "from_first", lambda make: make())
    (tmp_path / "file").touch()
    message = f"cannot make {tmp_path}/file/run: Not a directory; write another --runs-dir"
    with pytest.raises(OSError, match=message):
        agree.require_shared(tmp_path / "file" / "run", instead="write another --runs-dir")
