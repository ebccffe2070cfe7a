"""The file format safetensors: a JSON header, then the arrays, which are memory-mapped.

Hugging Face, `safetensors <https://github.com/huggingface/safetensors>`_, "Format": eight bytes
with the length of the header, little-endian; the header, which has dtype, shape and place of each
array; then the arrays, row by row.
"""

import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

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
_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
_PAGE = 4096  # bytes
_MOST_AXES = 8
_ENTRY = {"dtype": str, "shape": list[int], "data_offsets": list[int]}
_ALIGNED = 8  # the header is a multiple of this many bytes


def read(file: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, read-only and memory-mapped, so a page is read on access.

    Raises:
      ValueError: If the file cannot be read, or its header does not describe its bytes: each array
        begins where the one before it ends, and the last one ends with the file.
    """
    try:
        with checks.open_file(file) as opened:
            content = np.memmap(opened, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ValueError(f"{file} cannot be read ({error}); download it again.") from error
    size = int.from_bytes(content[:8].tobytes(), "little")
    if content.size < 8 or size > min(_LARGEST_HEADER, content.size - 8):
        raise _damaged(file, "its header is longer than the file")
    try:
        header = checks.json_value(content[8 : 8 + size].tobytes())
    except ValueError as error:
        raise _damaged(file, f"its header cannot be read ({error})") from error
    if not checks.is_of(header, dict[str, dict[str, Any]]):
        raise _damaged(file, f"its header cannot be read ({header!r:.80} describes no arrays)")
    header.pop("__metadata__", None)
    arrays = content[8 + size :]
    made = {name: _array(file, arrays, name, entry) for name, entry in header.items()}
    end = 0
    for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
        begin, next_end = header[name]["data_offsets"]
        if begin != end:
            raise _damaged(file, f"{name} begins at {begin}, but the arrays before it end at {end}")
        end = next_end
    if end != arrays.size:
        raise _damaged(file, f"its arrays end at {end}, but the file at {arrays.size}")
    return made


def write(file: str | pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a file that transformers can read."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        entry = {"dtype": names[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
    of: dict[str, str] = {}
    for file in sorted(set(places.values())):
        if file == ".." or pathlib.PurePath(file).name != file:
            raise _damaged(index, f"it names {file!r:.80}, which is not in its folder")
        for name, array in read(folder / file).items():
            if name in of:
                raise _damaged(folder, f"{name} is both in {of[name]} and in {file}")
            found[name], of[name] = array, file
    for name, file in places.items():
        if of.get(name) != file:
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
        of = {name: files[number] for name, number in places.items()}
        index = {"metadata": {"total_size": total}, "weight_map": of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _array(file, arrays: np.ndarray, name: str, entry: dict[str, Any]) -> np.ndarray:
    checks.of_keys(entry, f"{file}, {name}", **_ENTRY)
    dtype, shape, offsets = (entry[key] for key in _ENTRY)
    if len(offsets) != 2:
        raise _damaged(file, f"{name} has the data_offsets {str(offsets):.80}")
    begin, end = offsets
    if dtype not in DTYPES:
        raise ValueError(f"{file} holds {name} as {dtype}; those read are {', '.join(DTYPES)}.")
    sizes = [size or 1 for size in shape]  # NumPy multiplies the sizes of empty arrays, too
    if len(shape) > _MOST_AXES or min(0, begin, *shape) < 0 or math.prod(sizes) >= 2**60:
        raise _damaged(file, f"{name} has the shape {str(shape):.80} from {begin} to {end}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed or end > arrays.size:
        raise _damaged(file, f"{name} needs {needed} bytes and has those from {begin} to {end}")
    return arrays[begin:end].view(DTYPES[dtype]).reshape(shape)


def _damaged(file, why: str) -> ValueError:
    return ValueError(f"{file} is damaged: {why}; download it again.")
