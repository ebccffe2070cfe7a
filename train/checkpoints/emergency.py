"""Emergency copies: every few steps each process keeps its parts of the state on its own disk.

A neighbour on another host keeps a copy of what one process alone has. So a lost host costs few
steps, and no shared folder is read or written for that. Copies are an extra: a disk that is full or
a neighbour that is slow ends no run, and where a part is missing the last checkpoint is taken.
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

from train import checks
from train.checkpoints import parts, places
from train.checkpoints.parts import ALL, Entry
from train.checkpoints.places import Found
from train.checkpoints.trees import described, require_same
from train.checkpoints.writer import Claim
from train.config import Config
from train.output.metrics import write_text
from train.processes import agree, board, distributed, handing
from train.processes.exits import say

_NOTE = "emergency.json"
"""In the run's folder: the starts whose copies may be taken, and up to which step of each."""


@dataclasses.dataclass
class Copies:
    """The copies of a run, as one process of it keeps them.

    All processes call `keep` at the same steps. There they tell each other which copy is complete,
    and remove none that is newer than the newest that all have.
    """

    folder: Path  # of the run
    folders: list[Path]  # on this host; this process writes to the first one
    claim: Claim
    seconds: int  # for a file on its way to the neighbour
    patience: int  # for one that a start needs
    key: bytes
    peers: list[str]  # addresses of all processes; none where there is one
    wards: list[int]  # processes whose copies this one keeps
    neighbour: int | None
    valid: list[tuple[str, int | None]]  # starts and their last steps, as `_NOTE` has them
    last: int = -1  # the newest step that is complete here
    thread: threading.Thread | None = None
    failed: bool = False

    def wait(self) -> None:
        """Returns when the last copy is written, here and at the neighbour's."""
        if self.thread is not None:
            self.thread.join()

    def keep(self, step: int, tree: Any, metadata: dict[str, Any]) -> None:
        """Copies the arrays off the devices, and starts a thread that writes them."""
        self.wait()
        last = np.int32(self.last)
        whole = multihost_utils.process_allgather(last) if jax.process_count() > 1 else last
        held = parts.cut(tree, jax.process_index())
        made = held, {"leaves": described(tree), "run": metadata}
        # The last one here may be of use, once the others have theirs.
        kept = {int(np.min(whole)), self.last, step}
        self.thread = threading.Thread(target=self._write, args=(step, *made, kept), daemon=True)
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
            if not self.failed:  # the next ones will hardly do better
                say(f"no emergency copy of step {step}: {error}; the run goes on")
            self.failed = True

    def drop(self, kept: set[int]) -> None:
        """Removes copies of other steps than these, and what is left of writing such."""
        for path in self._files():
            step = path.name.partition("-")[0]
            if not step.isdecimal() or int(step) not in kept:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for folder in self.folders if folder.is_dir() for path in folder.iterdir()]

    def newest(self, at_least: int) -> Found | str:
        """The newest step of which all parts are there; in all processes alike.

        Args:
          at_least: Older ones are of no use.

        Returns:
          What was found; or what is missing of the newest one, and an empty text if none is there.
        """
        mine = [path.name for path in self._files() if self._is_valid(path)]
        return places.chosen(_told("copies-held", {"names": mine}), at_least)

    def _is_valid(self, path: Path) -> bool:
        name = parts.read_name(path.name)
        try:
            made = name and parts.digest(path)
        except OSError:
            return False
        return bool(made) and any(
            parts.is_of(name, token, made) and (most is None or name.step <= most)
            for token, most in self.valid
        )

    def fetch(self, found: Found) -> list[Path]:
        """This process's copies of the parts that it needs, after it has got what it lacked.

        Raises:
          OSError: In all processes, if one of them does not get a part.
        """
        me, count = jax.process_index(), jax.process_count()
        here = {path.name: path for path in self._files()}
        needed = {name: parts.read_name(name) for name in found.holders}
        # A new process needs what its predecessor had; another number of them anything.
        needed = [
            name for name, it in needed.items() if it.count != count or it.part in (ALL, str(me))
        ]
        problem, got = "", []
        for name in needed:
            try:
                got.append(here.get(name) or self._get(name, found.holders[name]))
            except OSError as error:
                problem = str(error)
        missing = len(needed) - len(got)
        lacking = multihost_utils.process_allgather(np.int32(missing)) if count > 1 else [missing]
        if np.any(lacking):
            raise OSError(problem or "other processes do not get their parts")
        return got

    def _get(self, name: str, holders: Sequence[int]) -> Path:
        error = OSError(f"nobody has {name}")
        for holder in holders:
            try:
                at, seconds = self.peers[holder], self.patience
                return handing.get(at, self.key, name, self.shelf(), seconds)
            except OSError as caught:
                error = caught
        raise error

    def shelf(self) -> handing.Shelf:
        """What this process takes from others and gives them."""

        def room(text, size):
            free = shutil.disk_usage(self.folders[0]).free
            name = parts.read_name(text)
            return self.folders[0] if name and size <= free else None

        def find(text):
            known = parts.read_name(text) is not None
            return next((path for path in self._files() if known and path.name == text), None)

        def is_good(text, made):
            tokens = [token for token, _ in self.valid] + [self.claim.token]
            return any(parts.is_of(parts.read_name(text), token, made) for token in tokens)

        return handing.Shelf(room, find, is_good)

    def wanted(self, text: str, size: int) -> Path | None:
        """Where a copy that another process brings goes; None if it is not one of a ward's."""
        name = parts.read_name(text)
        is_wards = name is not None and name.part in map(str, self.wards)
        if not is_wards or name.count != len(self.peers) or name.step < self.last:
            return None
        return self.shelf().room(text, size)

    def begin(self, step: int, found: Found | None) -> None:
        """Says that the run goes on from a step: of copies, if some were found, else otherwise.

        What else was copied is of a way that the run does not go, and is never taken any more.
        """
        tokens = [(token, step) for token, _ in self.valid] if found else []
        if agree.is_first():
            self.claim.require()
            note = {"valid": [*tokens, (self.claim.token, None)]}
            write_text(self.folder / _NOTE, json.dumps(note))
        for path in self._files():
            if found is None or path.name not in found.holders:
                path.unlink(missing_ok=True)
        self.last = step if found else -1

    def close(self) -> None:
        """Removes all: the run has saved what it ends with."""
        self.wait()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def load(files: Sequence[Path], like: Any, where: str) -> Any:
    """Puts the parts of a step together, on any devices.

    Raises:
      ValueError: If they are of another model, or not all that is needed.
    """
    held: list[tuple[Entry, np.ndarray]] = []
    for file in files:
        found, record = parts.read(file)
        held += found
    require_same(Path(where), record, described(like))
    return parts.assembled(like, held)


def record_of(files: Sequence[Path]) -> dict[str, Any]:
    """What a run has written down of the step of these parts."""
    _, record = parts.read(files[0])
    checks.of_keys(record, str(files[0]), leaves=dict[str, str], run=dict[str, Any])
    return record["run"]


@contextlib.contextmanager
def opened(config: Config, folder: Path, claim: Claim) -> Iterator[Copies | None]:
    """Finds this process's place for copies, and its neighbour; None if the run wants no copies.

    Every process of the run calls it at the same point.

    Raises:
      OSError: If the place is no folder that this user alone can write to.
    """
    if not config.emergency_every:
        if agree.is_first():
            (folder / _NOTE).unlink(missing_ok=True)
        yield None
        return
    me, count = jax.process_index(), jax.process_count()
    key, address = board.own()
    valid = [(str(token), most) for token, most in agree.from_first(lambda: _valid(folder))]
    hosts = [str(told.get("host")) for told in _told("copies-host", {"host": socket.gethostname()})]
    near = places.neighbours(hosts)
    copies = Copies(
        folder=folder,
        folders=places.of_process(Path(config.emergency_dir), claim.note.parents[1], hosts, me),
        claim=claim,
        seconds=config.watchdog_seconds,
        patience=config.start_seconds,
        key=key or claim.token.encode(),
        peers=[],
        wards=[process for process in range(count) if near[process] == me],
        neighbour=near[me] if count > 1 else None,
        valid=valid,
    )
    with contextlib.ExitStack() as stack:
        if count > 1:
            shelf = copies.shelf()._replace(room=copies.wanted)
            open_shelf = handing.open_shelf(address, copies.key, shelf, copies.patience)
            at = stack.enter_context(open_shelf)
            copies.peers = [str(told.get("at")) for told in _told("copies-at", {"at": at})]
        yield copies
        copies.close()  # not after an error: then they are what the run goes on from


def _told(folder: str, what: dict[str, Any]) -> list[dict[str, Any]]:
    """What each process says of itself."""
    texts = board.of_this_run()
    if texts is None:
        return [what]
    texts.put(folder, json.dumps(what))
    return distributed.answers(texts, folder, range(jax.process_count()), 600.0)


def _valid(folder: Path) -> list[list[Any]]:
    try:
        found = checks.json_object(folder / _NOTE, valid=list[list[Any]])["valid"]
    except ValueError:  # none yet, or of nobody who knows the form
        return []
    return [each for each in found if checks.is_of(tuple(each), tuple[str, int | None])]
