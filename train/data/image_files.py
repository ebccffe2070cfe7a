"""Stored small images: scikit-learn's digits, CIFAR-10."""

import gzip
import hashlib
import importlib.util
import io
import pathlib
import pickle
import pickletools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

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
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is no table of digits: {error}.") from error
    if not is_table or not np.all((rows >= 0) & (rows <= 16) & (rows % 1 == 0)):
        raise ValueError(
            f"{str(path)!r} is no table of digits: each line needs 64 whole numbers from 0 to 16 "
            f"and a class, separated by commas."
        )
    pixels = np.round(rows[:, :64] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    return _in_memory(pixels, rows[:, 64], None, path)


def cifar10(path: str) -> Stored:
    """Reads CIFAR-10 from its folder: `data_batch_1` to `_5` and `test_batch`, or those with .bin.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. The last batch is the
    validation part.

    Raises:
      ValueError: If a batch is missing or broken.
    """
    folder = pathlib.Path(path)
    is_binary = (folder / f"{_CIFAR10[0]}.bin").is_file()
    files = [folder / f"{name}{'.bin' if is_binary else ''}" for name in _CIFAR10]
    batches = [(_binary if is_binary else _pickled)(file) for file in files]
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


def _binary(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    content = np.frombuffer(on_disk.content_of(file), np.uint8)
    if not content.size or content.size % (1 + _CIFAR10_ROW):
        raise ValueError(
            f"{str(file)!r} is no batch of CIFAR-10: rows have {1 + _CIFAR10_ROW} bytes."
        )
    rows = content.reshape(-1, 1 + _CIFAR10_ROW)
    return rows[:, 1:], rows[:, 0]


def _pickled(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    content = on_disk.content_of(file)
    try:
        _require_small(content)
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # of any kind, as a pickle builds what it likes of these few parts
        raise ValueError(f"{str(file)!r} is no batch of CIFAR-10: {error!r:.200}.") from error
    found = batch if type(batch) is dict else {}
    rows, labels = (getattr(x, "array", x) for x in (found.get(b"data"), found.get(b"labels")))
    is_class = lambda x: type(x) is int and 0 <= x < 10
    if type(labels) is not list or not all(map(is_class, labels)):
        raise ValueError(f"{str(file)!r} is no batch of CIFAR-10: labels need numbers from 0 to 9.")
    if type(rows) is not np.ndarray or rows.shape != (len(labels), _CIFAR10_ROW):
        raise ValueError(
            f"{str(file)!r} is no batch of CIFAR-10: data needs a row of {_CIFAR10_ROW} bytes for "
            f"each of {len(labels)} labels."
        )
    return rows, np.array(labels, np.uint8)


def _require_small(content: bytes) -> None:
    """Raises a ValueError for what fills the memory or the stack of Python's reader."""
    tuples = 0
    for code, number, _ in pickletools.genops(content):  # which compares lengths with the content
        tuples += code.name.startswith(("TUPLE", "FROZENSET"))
        if tuples > 64:  # nested ones are hashed in C, without an end
            raise ValueError("it holds more tuples than its arrays need")
        if "PUT" in code.name and number is not None and number > len(content):
            raise ValueError("it remembers more objects than it has bytes")


class _Unpickler(pickle.Unpickler):
    """Unpickles numbers, texts, lists, and arrays of bytes; no part of NumPy is called.

    A pickle is a program, and NumPy takes an array of objects made of bytes for pointers.
    """

    def find_class(self, module: str, name: str) -> Any:
        known = {"_reconstruct": _Array, "ndarray": None, "dtype": _Dtype}
        if module.partition(".")[0] != "numpy" or name not in known:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no array")
        return known[name]


class _Dtype:
    """The type of an array in a pickle: a byte, the only one that is needed."""

    def __init__(self, name, *flags):
        if name not in (b"u1", "u1"):
            raise ValueError(f"it holds an array of {name!r:.40}, and not of bytes")

    def __setstate__(self, state):
        pass  # the order of the bytes of a number, for example: these have one


class _Array:
    """An array in a pickle, as NumPy describes it."""

    array = None

    def __init__(self, *empty):
        pass  # what NumPy makes before it learns the shape

    def __setstate__(self, state):
        _, shape, kind, by_columns, content = state
        if type(kind) is not _Dtype or type(content) is not bytes:
            raise ValueError("it holds an array that is not of bytes")
        flat = np.frombuffer(content, np.uint8)
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"it holds an array of shape {shape!r:.40}")
        self.array = flat.reshape(shape, order="F" if by_columns else "C")
