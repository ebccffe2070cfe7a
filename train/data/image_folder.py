"""Images in one folder per class, like ImageNet: checked once; broken images are left out."""

import hashlib
import io
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from train import checks
from train.data import files as on_disk
from train.data.image_files import Stored
from train.data.once import once
from train.output.progress import counted

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")  # Pillow's others may start programs
_MOST_PIXELS = 1 << 26  # of an image: many threads decode some, with up to 8 bytes for each
_REPORT = "images.json"
_AT_ONCE = 256  # files that are checked together


class _Found(NamedTuple):
    root: pathlib.Path
    files: list[pathlib.Path]
    names: list[str]  # below the root
    labels: list[int]
    validation: list[bool] | None
    classes: int


def read(path: str, cache: pathlib.Path) -> Stored:
    """Finds the images of a folder that has a folder for each class.

    If it has the folders `train` and `val`, these contain the classes, and `val` is the validation
    part. Classes are numbered in the order of their names. Every image is read and decoded once, to
    record the broken ones and a hash of all.

    Args:
      path: The folder.
      cache: Folder for the record; a record of the same files is reused.

    Raises:
      ValueError: If Pillow is not installed, there are no such folders, or no image can be read.
    """
    found = _find(path)
    stats = [(name, *_stat(file)) for name, file in zip(found.names, found.files, strict=True)]
    # The number changes with the rules of what can be read, so that all are looked at again.
    checked = once(cache, ("images", 3, stats), lambda new: _look(new, found))
    report = checks.json_object(checked / _REPORT, sha256=str, unreadable=dict[str, str])
    unreadable = report["unreadable"]
    kept = [n for n in range(len(found.files)) if found.names[n] not in unreadable]
    if not kept:
        name, reason = next(iter(unreadable.items()))
        raise ValueError(f"no image of {path!r} can be read; {name!r}: {reason}.")
    held = None if found.validation is None else np.array(found.validation)[kept]
    return Stored(
        names=[found.names[number] for number in kept],
        labels=np.array(found.labels, np.int32)[kept],
        validation=held,
        shape=None,
        classes=found.classes,
        sha256=report["sha256"],
        load=lambda number: picture(found.files[kept[number]]),
        unreadable=unreadable,
    )


def picture(file: pathlib.Path) -> Any:
    """The image of a file; a ValueError if it cannot be read."""
    return _decoded(file, on_disk.content_of(file))


def _find(path: str) -> _Found:
    checks.require_package("data.form='folder'", "pillow", extra="images", module="PIL")
    root = pathlib.Path(path)
    parts = [root / "train", root / "val"] if (root / "train").is_dir() else [root]
    found = [_image_files(part) for part in parts]
    files = [file for these in found for file in these]
    names = [file.relative_to(root).as_posix() for file in files]
    classes = [name.split("/")[len(parts) - 1] for name in names]
    in_train = len(found[0])
    numbers = {name: number for number, name in enumerate(sorted({*classes[:in_train]}))}
    shown = {path.name for path in parts[0].iterdir() if path.is_dir()}
    if empty := sorted(name for name in shown - numbers.keys() if not name.startswith(".")):
        raise ValueError(
            f"{str(parts[0])!r} has folders without images, {empty}, but each folder is a class; "
            f"put images there ({', '.join(sorted(_SUFFIXES))}), or take the folders out."
        )
    if strange := {*classes} - numbers.keys():
        raise ValueError(f"{str(parts[-1])!r} has classes that train has not: {sorted(strange)}.")
    return _Found(
        root=root,
        files=files,
        names=names,
        labels=[numbers[name] for name in classes],
        validation=[i >= in_train for i in range(len(files))] if len(parts) == 2 else None,
        classes=len(numbers),
    )


def _image_files(part: pathlib.Path) -> list[pathlib.Path]:
    """The images in a folder's subfolders."""
    found = [
        file
        for file in on_disk.files_below(part)
        if file.suffix.lower() in _SUFFIXES and file.parent != part
    ]
    if not found:
        raise ValueError(
            f"{str(part)!r} has no images in folders, one for each class; name the folder of these."
        )
    return found


def _stat(file: pathlib.Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:  # for example a broken link, which counts as unreadable
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _look(new: pathlib.Path, found: _Found) -> None:
    """Records the sha256 of all readable names and contents, and why others cannot be read."""

    def look(number):
        try:
            content = on_disk.content_of(found.files[number])
            _decoded(found.files[number], content)
        except ValueError as error:
            return str(error), ""
        return "", hashlib.sha256(content).hexdigest()

    digest, unreadable, count = hashlib.sha256(), {}, len(found.files)
    with ThreadPoolExecutor() as pool, counted(f"checking images of {found.root}", count) as show:
        for first in range(0, count, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, count))
            for number, (problem, sha256) in zip(numbers, pool.map(look, numbers), strict=True):
                name = found.names[number]
                if problem:
                    unreadable[name] = problem
                else:
                    digest.update(os.fsencode(f"{len(name)} {name} {sha256} "))
            show(len(numbers))
    report = {"sha256": digest.hexdigest(), "unreadable": unreadable}
    (new / _REPORT).write_text(json.dumps(report))


def _decoded(file: pathlib.Path, content: bytes) -> Any:
    from PIL import Image

    try:
        made = Image.open(io.BytesIO(content), formats=_FORMATS)
        if made.width * made.height > _MOST_PIXELS:
            raise ValueError(
                f"it has {made.width} x {made.height} pixels; needs at most {_MOST_PIXELS}"
            )
        if made.mode in ("I", "F"):  # Pillow would clip values to 255
            raise ValueError("its values have 32 bits; needs 8 or 16")
        if made.mode == "LAB":  # Pillow would fail, in the step that takes it
            raise ValueError("its colours are LAB; needs RGB")
        made.load()
    except Exception as error:  # of any kind, SyntaxError for one: the readers do not say which
        raise ValueError(f"{str(file)!r} cannot be read as an image: {error}.") from error
    if made.mode.startswith("I;16"):  # which Pillow would clip, too
        made = Image.fromarray((np.asarray(made) >> 8).astype(np.uint8))
    return made
