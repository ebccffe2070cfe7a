"""The files of a checkpoint directory: which checkpoints are complete, and which are intact.

`DIRECTORY/STEP/` is one checkpoint. It gets this name in one rename, when all of it is on disk, so
a folder whose name is a number is a finished save. Its `checksums.json` has the size and the CRC-32
of every file that matters: Orbax itself would read a flipped bit as a weight.
"""

import json
import shutil
import tempfile
import zlib
from pathlib import Path

from train import checks


def steps(directory: str | Path) -> list[int]:
    """Lists the steps of the complete checkpoints in a directory, in order; [] if none.

    A save that is running or was interrupted is not among them.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


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
        files = [path for item in ("state", "metadata") for path in (partial / item).rglob("*")]
        sums = {str(file.relative_to(partial)): _checksum(file) for file in files if file.is_file()}
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
    saved = steps(directory)
    step = max(saved, default=None) if step is None else step
    if step not in saved:
        raise ValueError(
            f"no checkpoint{'' if step is None else f' of step {step}'} in {directory}, only of "
            f"steps {saved}. Name one of these, or another directory"
        )
    path = directory / str(step)
    damage = _damage(path, item)
    if damage is None:
        return path
    good = next((s for s in reversed(saved) if s != step and not _damage(directory / str(s))), None)
    if good is None:
        remedy = "No other checkpoint there is good: delete the folder and start again"
    else:
        newer = " ".join(str(directory / str(other)) for other in saved if other > good)
        remedy = (
            f"Step {good} is good; to resume from it: rm -r {newer}"
            if newer
            else (f"Step {good} is good: name it")
        )
    raise ValueError(f"the checkpoint {path} is damaged: {damage}. {remedy}")


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


def _partial(directory):
    return list(directory.glob("*.orbax-checkpoint-tmp*"))


def _checksum(path):
    """Returns the size of a file and its CRC-32."""
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
    return [size, crc]


def _is_file(path):
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a possible file name
        return False


def _damage(path, item=""):
    """Describes the damage of a checkpoint's files; None if there is none."""
    try:
        sums = checks.json_object(path / "checksums.json")
    except ValueError as error:
        return str(error).rstrip(".")
    if not sums or not checks.is_of(sums, dict[str, list[int]]):
        return "checksums.json is not what a save has written"
    for name, sum_of in sums.items():
        if not name.startswith(item):
            continue
        if not _is_file(path / name):
            return f"{name:.80} is missing"
        got = _checksum(path / name)
        if got[:1] != sum_of[:1]:
            return f"{name} has {got[0]:,} bytes instead of {', '.join(map(str, sum_of[:1]))}"
        if got != sum_of:
            return f"the bytes of {name} have changed"
    return None
