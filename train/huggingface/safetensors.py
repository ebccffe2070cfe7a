"""The file format safetensors: a JSON header, then the arrays, which are memory-mapped.

Hugging Face, `safetensors <https://github.com/huggingface/safetensors>`_, "Format": eight bytes
with the length of the header, little-endian; the header, which has dtype, shape and place of each
array; then the arrays, row by row.
"""

import json
import math
import pathlib
from collections.abc import Iterable

import ml_dtypes
import numpy as np

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
_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit
_ALIGNED = 8  # the header is a multiple of this many bytes


def read(file: str | pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, read-only and memory-mapped, so a page is read on access.

    Raises:
      ValueError: If the file cannot be read, or its header does not describe its bytes.
    """
    file = pathlib.Path(file)
    try:
        content = np.memmap(file, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ValueError(f"{file} cannot be read ({error}); download it again.") from error
    size = int.from_bytes(content[:8].tobytes(), "little")
    if content.size < 8 or size > min(_LARGEST_HEADER, content.size - 8):
        raise _damaged(file, "its header is longer than the file")
    try:
        header = json.loads(content[8 : 8 + size].tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        described = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"its header cannot be read ({error!r})") from error
    arrays = content[8 + size :]
    return {name: _array(file, arrays, name, *entry) for name, entry in described.items()}


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

    Raises:
      ValueError: If there are none, or a file is missing or damaged.
    """
    folder = pathlib.Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise ValueError(
                f"{folder} has no model.safetensors, nor an index of several; if it has only "
                "pytorch_model.bin, load it with transformers and call save_pretrained."
            )
        return read(folder / "model.safetensors")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(index, f"it cannot be read ({error!r})") from error
    if outside := [name for name in names if pathlib.PurePath(name).name != name]:
        raise _damaged(index, f"it names {outside[0]!r}, which is not in its folder")
    return {name: array for file in names for name, array in read(folder / file).items()}


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


def _array(file, arrays, name, dtype, shape, begin, end):
    if dtype not in DTYPES:
        raise ValueError(f"{file} holds {name} as {dtype}; those read are {', '.join(DTYPES)}.")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise _damaged(file, f"{name} has the shape {shape} from {begin} to {end}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed or end > arrays.size:
        raise _damaged(file, f"{name} needs {needed} bytes and has those from {begin} to {end}")
    return arrays[begin:end].view(DTYPES[dtype]).reshape(shape)


def _damaged(file, why: str) -> ValueError:
    return ValueError(f"{file} is damaged: {why}; download it again.")
