"""Stored small images: scikit-learn's digits, CIFAR-10."""

import gzip
import hashlib
import importlib.util
import io
import pathlib
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from train.data import files as on_disk

_CIFAR10 = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_CIFAR10_ROW = 3 * 32 * 32
_MOST_TABLE = 1 << 24  # bytes of a table of digits; scikit-learn's has 264,712


class Stored(NamedTuple):
    """Stored images, accessed by number.

    Attributes:
      names: A name for each image; equal images have equal names.
      labels: i32[size], the class of each.
      validation: bool[size], the data set's own validation part; None if it has none.
      shape: Height, width and channels; None for images of any shape.
      classes: Number of classes.
      sha256: Sha256 of all images and labels.
      load: Number -> u8[height, width, channels] or, if `shape` is None, a Pillow image.
      unreadable: Reasons why images cannot be read, by name; all other fields leave these out.
    """

    names: list[str]
    labels: np.ndarray
    validation: np.ndarray | None
    shape: tuple[int, int, int] | None
    classes: int
    sha256: str
    load: Callable
    unreadable: dict[str, str] = {}


def digits(path: str | None) -> Stored:
    """Reads scikit-learn's digits: lines of 64 numbers from 0 to 16, and a class from 0 to 9.

    Raises:
      ValueError: If there is no such file, or it holds something else.
    """
    if path is None:
        found = importlib.util.find_spec("sklearn")
        if found is None:
            raise ValueError(
                "data.form='digits' needs the package scikit-learn, which has the images in it; "
                "run pip install -e '.[images]' in the checkout, or write --data.path with its "
                "digits.csv.gz."
            )
        path = pathlib.Path(found.submodule_search_locations[0], "datasets/data/digits.csv.gz")
    content = on_disk.content_of(pathlib.Path(path), _MOST_TABLE)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
            is_packed = content[:2] == b"\x1f\x8b"
            text = packed.read(_MOST_TABLE + 1) if is_packed else content
        if len(text) > _MOST_TABLE:
            raise ValueError(f"it has more than {_MOST_TABLE} bytes")
        lines = text.split()
        is_table = bool(lines) and all(line.count(b",") == 64 for line in lines)
        rows = np.array([line.split(b",") for line in lines if is_table], np.float64)
        if not is_table or not np.all((rows >= 0) & (rows <= 16) & (rows % 1 == 0)):
            raise ValueError(
                "each line needs 64 whole numbers from 0 to 16 and a class, separated by commas"
            )
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is no table of digits: {error}.") from error
    pixels = np.round(rows[:, :64] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    return _in_memory(pixels, rows[:, 64], None, path)


def cifar10(path: str) -> Stored:
    """Reads CIFAR-10's binary version from its folder: `data_batch_1.bin` to `_5` and `test_batch`.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The last batch is the
    validation part.

    Raises:
      ValueError: If a batch is missing or broken.
    """
    folder = pathlib.Path(path)
    if (folder / _CIFAR10[0]).exists():
        raise ValueError(
            f"{path!r} holds pickles, which are programs; needs CIFAR-10's binary version: write "
            "--data.path with the folder of cifar-10-binary.tar.gz."
        )
    batches = [_batch(folder / f"{name}.bin") for name in _CIFAR10]
    rows, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    pixels = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    validation = np.arange(len(labels)) >= len(labels) - len(batches[-1][1])
    return _in_memory(pixels, labels, validation, path)


def _in_memory(pixels, labels, validation, path) -> Stored:
    if np.any((labels < 0) | (labels > 9)):
        raise ValueError(f"{str(path)!r} has a class that is not in [0, 10).")
    labels = labels.astype(np.int32)
    return Stored(
        names=[hashlib.sha256(image.tobytes()).hexdigest() for image in pixels],
        labels=labels,
        validation=validation,
        shape=pixels.shape[1:],
        classes=10,
        sha256=hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest(),
        load=lambda number: pixels[number],
    )


def _batch(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    content = np.frombuffer(on_disk.content_of(file), np.uint8)
    if not content.size or content.size % (1 + _CIFAR10_ROW):
        raise ValueError(
            f"{str(file)!r} is no batch of CIFAR-10: rows have {1 + _CIFAR10_ROW} bytes."
        )
    rows = content.reshape(-1, 1 + _CIFAR10_ROW)
    return rows[:, 1:], rows[:, 0]
