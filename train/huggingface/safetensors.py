"""Files of arrays in the format safetensors, memory-mapped; folders of several, with an index.

Hugging Face, `safetensors <https://github.com/huggingface/safetensors>`_, "Format": eight bytes
with the length of the header, little-endian; the header, which has dtype, shape and place of each
array; then the arrays, row by row. The package `safetensors` checks and writes files.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from train import checks

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""The supported dtypes; files with others raise."""
FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))
"""Those that weights may have."""
_PAGE = 4096  # bytes


def read(file: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, read-only and memory-mapped, so a page is read on access.

    The package would copy each array that is read.

    Raises:
      ValueError: If the file cannot be read, or its header does not describe its bytes: each array
        begins where the one before it ends, and the last one ends with the file.
    """
    try:
        with checks.open_file(file) as opened:  # the package would wait for a pipe
            content = np.memmap(opened, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ValueError(f"{file} cannot be read ({error}); download it again.") from error
    try:
        with safe_open(file, "numpy"):  # which compares the header with the file
            size = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = checks.json_value(content[8:size].tobytes())
        header.pop("__metadata__", None)
        return {name: _array(content[size:], name, entry) for name, entry in header.items()}
    except (SafetensorError, ValueError) as error:
        raise _damaged(file, str(error)) from error


def write(file: str | pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a file that transformers can read; an OSError if it cannot be written."""
    made = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    file = pathlib.Path(file)
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(made, file, {"format": "pt"})  # which transformers requires
    except SafetensorError as error:  # the package has an OSError's number only in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
    file.chmod(mode)  # the package's own file would be for its owner alone


def read_all(folder: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a folder: from model.safetensors, or from the files in its index.

    As in transformers, an index beside a model.safetensors is not read: it is of an older model.

    Raises:
      ValueError: If there are none, or a file is missing or damaged.
    """
    folder = pathlib.Path(folder)
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.lexists(one):
        return read(one)
    if not os.path.lexists(index):
        raise ValueError(
            f"{folder} has no model.safetensors, nor an index of several; if it has only "
            "pytorch_model.bin, load it with transformers and call save_pretrained."
        )
    places = checks.json_object(index, weight_map=dict[str, str])["weight_map"]
    found: dict[str, np.ndarray] = {}
    holder: dict[str, str] = {}
    for file in sorted(set(places.values())):
        if file == ".." or pathlib.PurePath(file).name != file:
            raise _damaged(index, f"it names {file!r:.80}, which is not in its folder")
        for name, array in read(folder / file).items():
            if name in holder:
                raise _damaged(folder, f"{name} is both in {holder[name]} and in {file}")
            found[name], holder[name] = array, file
    for name, file in places.items():
        if holder.get(name) != file:
            raise _damaged(index, f"it has {name!r:.80} in {file}, where it is not")
    return found


def sampled(folder: str | pathlib.Path) -> str:
    """A SHA-256 of all names, dtypes and shapes, and of three pages of each array.

    Seconds for any size: two models whose training differed differ in every array.
    """
    sha256 = hashlib.sha256()
    for name, array in sorted(read_all(folder).items()):
        values = array.reshape(-1).view(np.uint8)
        sha256.update(f"{name} {array.dtype} {array.shape}".encode())
        for begin in (0, values.size // 2, max(0, values.size - _PAGE)):
            sha256.update(values[begin : begin + _PAGE])
    return sha256.hexdigest()


def write_all(
    folder: pathlib.Path, arrays: Iterable[tuple[str, np.ndarray]], most: int = 2 << 30
) -> None:
    """Writes arrays in order to files of limited size, or of one array each, and an index.

    The arrays of one file are in memory at a time.
    """
    places: dict[str, int] = {}
    part: dict[str, np.ndarray] = {}
    count = total = 0

    def flush():
        nonlocal count
        write(folder / f"{count}.part", part)
        count += 1
        part.clear()

    for name, array in arrays:
        if part and sum(x.nbytes for x in part.values()) + array.nbytes > most:
            flush()
        part[name], places[name] = array, count
        total += array.nbytes
    flush()
    one = count == 1
    files = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, file in enumerate(["model.safetensors"] if one else files):
        (folder / f"{number}.part").rename(folder / file)
    if not one:
        weight_map = {name: files[number] for name, number in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _array(arrays: np.ndarray, name: str, entry: dict[str, Any]) -> np.ndarray:
    if (dtype := entry["dtype"]) not in DTYPES:
        raise ValueError(f"it holds {name} as {dtype}; those read are {', '.join(DTYPES)}")
    return arrays[slice(*entry["data_offsets"])].view(DTYPES[dtype]).reshape(entry["shape"])


def _damaged(file, why: str) -> ValueError:
    return ValueError(f"{file} is damaged: {why}; download it again.")
