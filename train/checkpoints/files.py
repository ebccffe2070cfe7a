"""The files of a checkpoint directory: which checkpoints are complete, and which are intact.

`DIRECTORY/STEP/` is one checkpoint. It gets this name in one rename, when all of it is on disk, so
a folder whose name is a number is a finished save. Its `checksums.json` has the size and the CRC-32
of every file that matters: Orbax itself would read a flipped bit as a weight.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import zlib
from pathlib import Path

from train import checks

_STEP = re.compile("0|[1-9][0-9]{0,17}")  # the name of a complete checkpoint
_MARK = "commit_success.txt"  # that Orbax adds to some file systems' folders, after the checksums


class Removed(ValueError):
    """A checkpoint that a running run has removed while it was read."""


def steps(directory: str | Path) -> list[int]:
    """Lists the steps of the complete checkpoints in a directory, in order; [] if none.

    A save that is running or was interrupted is not among them.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(int(path.name) for path in named if path.is_dir())


def latest(directory: str | Path) -> int | None:
    """Returns the step of the newest complete checkpoint, or None if there is none."""
    return max(steps(directory), default=None)


def require_writable(directory: Path) -> None:
    """Makes a directory if necessary; raises OSError if no file can be made in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write checkpoints to {directory}: {error.strerror}. "
            "Name a folder that you may write to",
        ) from error


def require_newest(directory: Path, step: int) -> None:
    """Raises ValueError if there is a checkpoint of this step or a later one."""
    newer = [saved for saved in steps(directory) if saved >= step]
    if newer:
        raise ValueError(
            f"cannot save step {step}: {directory} already has checkpoints of steps {newer}. "
            "Resume from the newest, delete those folders, or name another directory"
        )


def remove_partial(directory: Path) -> None:
    """Deletes unfinished saves."""
    for path in _partial(directory):
        shutil.rmtree(path, ignore_errors=True)


def write_checksums(directory: Path) -> None:
    """Adds `checksums.json` to a save just before it is complete."""
    for partial in _partial(directory):
        sums = {name: _checksum(partial / name) for name in _files(partial)}
        (partial / "checksums.json").write_text(json.dumps(sums, indent=1, sort_keys=True))


def intact(directory: str | Path, step: int | None = None, item: str = "") -> Path:
    """Finds a checkpoint, and reads all its bytes to check that they have not changed.

    Args:
      directory: Where the checkpoints are.
      step: Which one; the newest by default.
      item: With `"metadata"`, checks only the metadata.

    Returns:
      Its path.

    Raises:
      ValueError: If there is no such checkpoint, or it is damaged; the text names the newest intact
        one.
    """
    directory = Path(directory)
    saved, step, damage = _examined(directory, step, item)
    path = directory / str(step)
    if damage is None:
        return path
    good = next((s for s in reversed(saved) if s != step and not _damage(directory / str(s))), None)
    if good is None:
        remedy = "No other checkpoint there is good: delete the folder and start again"
    else:
        newer = shlex.join(str(directory / str(other)) for other in saved if other > good)
        remedy = (
            f"Step {good} is good; to resume from it: rm -r {newer}"
            if newer
            else (f"Step {good} is good: name it")
        )
    raise ValueError(f"the checkpoint {path} is damaged: {damage}. {remedy}")


def digest(path: Path) -> str:
    """A SHA-256 of a checkpoint: of the checksums of all its files."""
    return hashlib.sha256(checks.read_file(path / "checksums.json")).hexdigest()


def require_kept(path: Path) -> None:
    """Raises `Removed` if a checkpoint, or a file of it, is not there any more."""
    try:
        lost = _sums(path).keys() - _files(path)
    except (FileNotFoundError, ValueError):
        lost = {"checksums.json"}
    if lost:
        raise Removed(
            f"the checkpoint {path} was removed while it was read: its run goes on, and keeps only "
            "its newest ones. Start this command again"
        )


def pass_over_damaged(directory: Path) -> list[str]:
    """Renames damaged checkpoints, if an older one is intact: `40` becomes `damaged-40`.

    Args:
      directory: Where the checkpoints are.

    Returns:
      The damage of each of them, newest first.

    Raises:
      ValueError: If all are damaged; then nothing is renamed.
    """
    damages = {}
    for step in reversed(steps(directory)):
        if (damage := _damage(directory / str(step))) is None:
            break
        damages[step] = damage
    else:
        if damages:
            intact(directory)  # raises, since all are damaged
    for step in damages:
        aside = directory / f"damaged-{step}"
        if aside.exists():
            shutil.rmtree(aside)
        (directory / str(step)).rename(aside)
    return [f"step {step} is damaged: {damage}" for step, damage in damages.items()]


def _examined(directory: Path, step: int | None, item: str) -> tuple[list[int], int, str | None]:
    """The steps of a directory, the one that is named or the newest, and its damage."""
    while True:
        saved = steps(directory)
        chosen = max(saved, default=None) if step is None else step
        if chosen not in saved:
            which = "" if step is None else f" of step {step}"
            there = f", only of steps {saved}. Name one of these, or" if saved else ". Name"
            raise ValueError(f"no checkpoint{which} in {directory}{there} another directory")
        damage = _damage(directory / str(chosen), item)
        # A running run removes its older checkpoints, perhaps while this one is read.
        if damage is None or chosen == (latest(directory) if step is None else step):
            return saved, chosen, damage


def _files(path: Path, item: str = "") -> set[str]:
    """The names of what a checkpoint consists of: all in its items that is no folder."""

    def refuse(error):  # what may not be listed is not missing
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    items = [item] if item else ["state", "metadata"]
    walked = [each for item in items for each in os.walk(path / item, onerror=refuse)]
    found = [Path(folder, name) for folder, _, names in walked for name in names]
    return {str(file.relative_to(path)) for file in found if file.name != _MARK}


def _sums(path: Path) -> dict[str, list[int]]:
    """Reads a checkpoint's `checksums.json`; a ValueError if a save has not written it so."""
    sums = checks.json_value(checks.read_file(path / "checksums.json"))
    if not sums or not checks.has_type(sums, dict[str, list[int]]):
        raise ValueError("it has no checksums")
    return sums


def _partial(directory):
    return list(directory.glob("*.orbax-checkpoint-tmp*"))


def _checksum(path):
    """Returns the size of a file and its CRC-32."""
    size = crc = 0
    with checks.open_file(path) as file:
        while piece := file.read(1 << 24):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return [size, crc]


def _damage(path, item=""):
    """Describes the damage of a checkpoint's files; None if there is none.

    What this user may not read is no damage, but an OSError: a good checkpoint would be put aside.
    """
    try:
        sums = _sums(path)
    except FileNotFoundError:
        return "checksums.json is missing"
    except ValueError as error:
        return f"checksums.json is not what a save has written: {str(error).rstrip('.')}"
    needed = {name for name in sums if not item or name.startswith(f"{item}/")}
    there = _files(path, item)
    if missing := sorted(needed - there):
        return f"{missing[0]:.80} is missing"
    if added := sorted(there - needed):
        return f"{added[0]:.80} is not among the files that checksums.json names"
    for name in sorted(needed):
        try:
            got = _checksum(path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except ValueError as error:  # a FIFO, for example
            return str(error).rstrip(".")
        if got[:1] != sums[name][:1]:
            return f"{name} has {got[0]:,} bytes instead of {', '.join(map(str, sums[name][:1]))}"
        if got != sums[name]:
            return f"the bytes of {name} have changed"
    return None
