"""A lease that allows one writer per run folder.

`FOLDER/writer/N` is the note of the Nth writer, which renews it every few seconds. A process that
finds it unchanged for a lease, by its own clock, makes the note N + 1, which only one process can,
and removes the older ones before it writes anything else. A process that was frozen meanwhile finds
its note gone, and ends. This needs no links and no file locks.
"""

import contextlib
import datetime
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxcomp.launch import agree, regular, seals
from jaxcomp.launch.exits import Transient, say

LEASE = 30.0
"""Seconds without a sign of the writer after which another may take over its folder."""

_BEATS = 10  # signs of life in a lease
_SIZE = 512  # bytes of a note, always, so that one write renews it


class Claim(NamedTuple):
    """The writer of a folder, known to all processes of its run."""

    note: Path
    token: str  # the start of the note
    since: str  # when it was made

    def require(self) -> None:
        """Raises `Transient` if another run has taken the folder over; an OSError if it is gone."""
        if self.token != _token(self.note):
            folder = self.note.parents[1]
            if not self.note.parent.is_dir():
                raise OSError(
                    errno.ENOENT,
                    f"{folder} was moved or removed while this run wrote there. To go on, start "
                    "the run again with the name that the folder has now",
                )
            raise Transient(
                f"this run was silent so long that another one has taken {folder} over: "
                f"{_who(_newest(self.note.parent))}. It writes nothing more there"
            )


@contextlib.contextmanager
def claimed(
    folder: Path, lease: float = LEASE, instead: str = "take another folder"
) -> Iterator[Claim]:
    """Makes this run the writer of its folder until the end.

    Every process of the run calls it at the same point; process 0 holds the claim. What earlier
    writers have not finished may then be removed.

    Args:
      folder: Folder of the run; created if necessary.
      lease: Seconds.
      instead: What to do instead, for the message.

    Raises:
      Transient: In all processes, if another run writes there: the text says who, and since when.
    """
    note, token, since = agree.from_first(
        lambda: _take(folder.absolute() / "writer", lease, instead)
    )
    claim = Claim(Path(note), token, since)
    if not agree.is_first():
        yield claim
        return
    closed = threading.Event()
    thread = threading.Thread(target=_renew, args=(claim, lease, closed), daemon=True)
    thread.start()
    try:
        yield claim
    finally:
        closed.set()
        thread.join(lease / _BEATS)
        with contextlib.suppress(OSError):
            _write(claim, done=True)


def _take(directory: Path, lease: float, instead: str) -> tuple[str, str, str]:
    regular.make_folder(directory, instead)
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    token = secrets.token_hex(16)
    while True:
        newest = _newest(directory)
        if newest is not None and _is_alive(newest, lease):
            raise Transient(
                f"{directory.parent} has a writer: {_who(newest)}. Wait for its end or stop it, or "
                f"{instead}"
            )
        note = directory / str(int(newest.name) + 1 if newest else 1)
        try:
            os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue
        try:
            _write(Claim(note, token, now))
        except OSError as error:
            note.unlink(missing_ok=True)  # the next start would wait for a sign of it
            raise OSError(error.errno, error.strerror, str(note)) from error
        # A slow process may have made a number that others have passed.
        if _newest(directory) != note:
            note.unlink(missing_ok=True)
            continue
        for older in _notes(directory):
            if older != note:
                older.unlink(missing_ok=True)
        return str(note), token, now


def _notes(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.isdecimal()]


def _newest(directory: Path) -> Path | None:
    return max(_notes(directory), key=lambda path: int(path.name), default=None)


def _renew(claim: Claim, lease: float, closed: threading.Event) -> None:
    while not closed.wait(lease / _BEATS):
        with contextlib.suppress(OSError):  # perhaps it can be written at the next beat
            _write(claim)


def _write(claim: Claim, done: bool = False) -> None:
    """Renews a note. If it is gone, `require` will report that.

    Raises:
      OSError: If it cannot be written, for example because the disk is full.
    """
    record = {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": claim.since,
        "place": _place(os.getpid()),
        "done": done,
        "sign": f"{time.monotonic_ns():020d}",
    }
    text = f"{claim.token}\n{json.dumps(record)}".encode()
    with contextlib.suppress(FileNotFoundError):
        file = os.open(claim.note, os.O_WRONLY | os.O_NONBLOCK)  # a FIFO may be there
        try:
            os.pwrite(file, text.ljust(_SIZE), 0)
        finally:
            os.close(file)


def _read(note: Path) -> bytes | None:
    try:
        with regular.open_file(note) as file:
            return file.read(_SIZE)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # a network file system's error for a removed file
            return None
        raise


def _token(note: Path) -> str:
    return (_read(note) or b"").partition(b"\n")[0].decode(errors="replace")


def _record_of(note: Path) -> dict[str, Any]:
    return seals.json_object((_read(note) or b"").partition(b"\n")[2]) or {}


def _who(note: Path | None) -> str:
    record = _record_of(note) if note else {}
    host = record.get("host", "a host that does not say it")
    return (
        f"process {record.get('process', '?')} on {host}, "
        f"since {record.get('since', 'a time that it does not say')}"
    )


def _is_alive(note: Path, lease: float) -> bool:
    """Whether a writer gives a sign within a lease; at once if this host sees that it is gone."""
    record, first = _record_of(note), _read(note)
    place = record.get("place")
    if first is None or record.get("done") is True:
        return False
    here = _place(os.getpid())
    if isinstance(place, list) and here is not None and place[:2] == here[:2]:
        process = record.get("process")
        if type(process) is not int or _place(process) != place:
            return False
    deadline, shown = time.monotonic() + lease, False
    while time.monotonic() < deadline:
        time.sleep(lease / _BEATS / 4)
        if (now := _read(note)) != first:
            return now is not None and _record_of(note).get("done") is not True
        if not shown and time.monotonic() > deadline - lease / 2:
            say(f"waiting up to {lease / 2:.0f} s for a sign of {_who(note)}")
            shown = True
    return False


def _place(process: int) -> list[str] | None:
    """Identifies a process: machine, PID namespace, and start time.

    None if there is no such process, or this is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else [boot, space, fields[18]]
