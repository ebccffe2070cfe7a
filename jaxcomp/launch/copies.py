"""Emergency copies: every few steps each process copies its parts of the state to its own disk.

A neighbour on another host keeps a copy of what only one process has. So a lost host costs few
steps, without a shared folder. Copies are optional: a full disk or a slow neighbour does not end a
run, and if a part is missing, the run resumes from the last checkpoint.
"""

import contextlib
import dataclasses
import errno
import json
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxcomp.launch import agree, board, distributed, handing, holders, parts, regular, seals
from jaxcomp.launch.claims import Claim
from jaxcomp.launch.exits import say
from jaxcomp.launch.holders import Found
from jaxcomp.launch.parts import ALL

_NOTE = "emergency.json"
"""File in the run's folder: the starts whose copies may be used, and up to which step."""


@dataclasses.dataclass
class Copies:
    """The copies of a run that one process keeps.

    All processes call `keep` at the same steps. Then they tell each other which copies are
    complete, and remove only copies that are older than the newest common one.
    """

    folder: Path  # of the run
    folders: list[Path]  # on this host; this process writes to the first
    claim: Claim
    seconds: int  # to send a file to the neighbour
    patience: int  # to fetch a file at a start
    key: bytes
    peers: list[str]  # addresses of all processes; empty for one process
    kept_for: list[int]  # processes whose copies this one keeps
    neighbour: int | None
    valid: list[tuple[str, int | None]]  # starts and their last steps, as in `_NOTE`
    last: int = -1  # the newest step that is complete here
    thread: threading.Thread | None = None
    failed: bool = False

    def wait(self) -> None:
        """Returns when the last copy is written, here and at the neighbour's."""
        if self.thread is not None:
            self.thread.join()

    def keep(self, step: int, tree: Any, record: dict[str, Any]) -> None:
        """Copies the arrays off the devices, and starts a thread that writes them with a record."""
        self.wait()
        whole = multihost_utils.process_allgather(np.int32(self.last))
        held = parts.cut(tree, jax.process_index())
        # The last copy here may become usable once the others have theirs.
        kept = {int(np.min(whole)), self.last, step}
        self.thread = threading.Thread(
            target=self._write, args=(step, held, record, kept), daemon=True
        )
        self.thread.start()

    def _write(self, step: int, held: dict[str, list], record: dict[str, Any], kept: set[int]):
        try:
            self.drop(kept)
            needed = sum(array.nbytes for each in held.values() for _, array in each)
            if needed > shutil.disk_usage(self.folders[0]).free:
                raise OSError(errno.ENOSPC, f"no space in {self.folders[0]}")
            count, own = jax.process_count(), str(jax.process_index())
            written = {
                part: parts.write(
                    self.folders[0], self.claim.token, step, part, count, each, record
                )
                for part, each in held.items()
            }
            if self.neighbour is not None:
                handing.put(self.peers[self.neighbour], self.key, written[own], self.seconds)
            self.last, self.failed = step, False
        except OSError as error:
            if not self.failed:  # say it once
                say(f"no emergency copy of step {step}: {error}; the run goes on")
            self.failed = True

    def drop(self, kept: set[int]) -> None:
        """Removes copies of other steps, and unfinished ones."""
        for path in self._files():
            step = path.name.partition("-")[0]
            if not step.isdecimal() or int(step) not in kept:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for folder in self.folders if folder.is_dir() for path in folder.iterdir()]

    def newest(self, at_least: int) -> Found | str:
        """Finds the newest step with all parts; the same on all processes.

        Args:
          at_least: Older steps are ignored.

        Returns:
          What was found; or a text about what the newest step lacks, empty if there are no copies.
        """
        mine = [path.name for path in self._files() if self._is_valid(path)]
        return holders.chosen(_from_all("copies-held", {"names": mine}), at_least)

    def _is_valid(self, path: Path) -> bool:
        if (name := parts.read_name(path.name)) is None:
            return False
        try:
            made = parts.digest(path)
        except (OSError, ValueError):  # a folder or a FIFO with such a name
            return False
        return any(
            parts.belongs_to(name, token, made) and (most is None or name.step <= most)
            for token, most in self.valid
        )

    def fetch(self, found: Found) -> list[Path]:
        """Fetches missing parts from other processes, and returns this process's copies.

        Raises:
          OSError: In all processes, if one of them does not get a part.
        """
        me, count = jax.process_index(), jax.process_count()
        here = {path.name: path for path in self._files()}
        names = {name: parts.read_name(name) for name in found.holders}
        # A new process needs its predecessor's parts; with another number of processes, any.
        needed = [
            name
            for name, it in names.items()
            if it is not None and (it.count != count or it.part in (ALL, str(me)))
        ]
        problem, got = "", []
        for name in needed:
            try:
                got.append(here.get(name) or self._get(name, found.holders[name]))
            except OSError as error:
                problem = str(error)
        missing = len(needed) - len(got)
        if np.any(multihost_utils.process_allgather(np.int32(missing))):
            raise OSError(problem or "other processes do not get their parts")
        return got

    def _get(self, name: str, holders: Sequence[int]) -> Path:
        error = OSError(f"nobody has {name}")
        for holder in holders:
            try:
                at, seconds = self.peers[holder], self.patience
                return handing.get(at, self.key, name, self.store(), seconds)
            except OSError as caught:
                error = caught
        raise error

    def store(self) -> handing.FileStore:
        """The files that this process takes from others and gives to them."""

        def room(text, size):
            free = shutil.disk_usage(self.folders[0]).free
            name = parts.read_name(text)
            return self.folders[0] if name and size <= free else None

        def find(text):
            known = parts.read_name(text) is not None
            return next((path for path in self._files() if known and path.name == text), None)

        def is_good(text, made):
            tokens = [token for token, _ in self.valid] + [self.claim.token]
            return any(parts.belongs_to(parts.read_name(text), token, made) for token in tokens)

        return handing.FileStore(room, find, is_good)

    def wanted(self, text: str, size: int) -> Path | None:
        """Where to put a copy from another process; None if it is not from one of its wards."""
        name = parts.read_name(text)
        if name is None or name.part not in map(str, self.kept_for):
            return None
        if name.count != len(self.peers) or name.step < self.last:
            return None
        return self.store().room(text, size)

    def begin(self, step: int, found: Found | None) -> None:
        """Records that the run resumes from a step, from copies if some were found.

        Later copies belong to a history that is abandoned, and are never used again.
        """
        tokens = [(token, step) for token, _ in self.valid] if found else []
        if agree.is_first():
            self.claim.require()
            note = {"valid": [*tokens, (self.claim.token, None)]}
            regular.write_text(self.folder / _NOTE, json.dumps(note))
        for path in self._files():
            if found is None or path.name not in found.holders:
                path.unlink(missing_ok=True)
        self.last = step if found else -1

    def close(self) -> None:
        """Removes all copies, since the run has saved its end."""
        self.wait()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the run's processes here that still end have theirs
            self.folders[0].parent.rmdir()


@contextlib.contextmanager
def opened(
    folder: Path, claim: Claim, directory: Path, seconds: int, patience: int, instead: str = ""
) -> Iterator[Copies]:
    """Finds this process's folder for copies, and its neighbour.

    Every process of the run calls it at the same point.

    Args:
      folder: Of the run.
      claim: Claim to it.
      directory: For the copies, on each host; it may be shared with other users, such as /tmp.
      seconds: To send a file to the neighbour.
      patience: To fetch a file at a start.
      instead: What to write if the directory cannot be used, for the message.

    Raises:
      OSError: If the folder is not one that only this user can write to.
    """
    me, count = jax.process_index(), jax.process_count()
    key, address = board.own()
    valid = [(str(token), most) for token, most in agree.from_first(lambda: _valid(folder))]
    hosts = [
        str(each.get("host")) for each in _from_all("copies-host", {"host": socket.gethostname()})
    ]
    near = holders.neighbours(hosts)
    copies = Copies(
        folder=folder,
        folders=holders.folders_for(directory, claim.note.parents[1], hosts, me, instead),
        claim=claim,
        seconds=seconds,
        patience=patience,
        key=key or claim.token.encode(),
        peers=[],
        kept_for=[process for process in range(count) if near[process] == me],
        neighbour=near[me] if count > 1 else None,
        valid=valid,
    )
    with contextlib.ExitStack() as stack:
        if count > 1:
            store = copies.store()._replace(room=copies.wanted)
            serve_files = handing.serve_files(address, copies.key, store, copies.patience)
            at = stack.enter_context(serve_files)
            copies.peers = [str(each.get("at")) for each in _from_all("copies-at", {"at": at})]
        yield copies
        copies.close()  # not after an error: the run resumes from them


def forget(folder: Path) -> None:
    """Makes sure that no start goes on from copies that were made before this one."""
    if agree.is_first():
        (folder / _NOTE).unlink(missing_ok=True)


def _from_all(folder: str, what: dict[str, Any]) -> list[dict[str, Any]]:
    """The values of all processes."""
    texts = board.this_run()
    if texts is None:
        return [what]
    texts.put(folder, json.dumps(what))
    return distributed.answers(texts, folder, range(jax.process_count()), 600.0)


def _valid(folder: Path) -> list[list[Any]]:
    try:
        with regular.open_file(folder / _NOTE) as file:
            found = (seals.json_object(file.read(parts.LONGEST)) or {}).get("valid")
    except (OSError, ValueError):  # no file yet, or something else with its name
        return []
    return [each for each in found if _is_valid(each)] if isinstance(found, list) else []


def _is_valid(each: Any) -> bool:
    if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str):
        return False
    return each[1] is None or (type(each[1]) is int and abs(each[1]) < 2**63)
