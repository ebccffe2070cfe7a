"""A step's state in parts: one that all processes hold, and one for each process's own.

A part is a file: a line of JSON that describes it, then the bytes of its arrays. Its name has the
step, the part and the number of parts, and a code of its bytes under the token of the start that
made it: `57-all-of-8.CODE`, `57-3-of-8.CODE`. So a truncated or changed file, or one from another
run or start, is never used.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.launch import regular, seals

ALL = "all"
"""The part that every process holds."""

LONGEST = 1 << 24
"""Most bytes of the line that describes a part."""

_NAME = re.compile(r"([0-9]{1,15})-(all|[0-9]{1,7})-of-([0-9]{1,7})\.([0-9a-f]{64})")

Spans = tuple[tuple[int, int], ...]


class Name(NamedTuple):
    """The name of a part's file."""

    step: int
    part: str  # ALL, or the number of a process
    count: int  # type: ignore[assignment]  # of processes
    code: str


class Entry(NamedTuple):
    """A piece of an array of the state."""

    path: str
    dtype: str
    spans: Spans  # start and stop along each axis

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.spans)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def read_name(text: str) -> Name | None:
    """Reads the name of a file; None if it is not a part."""
    found = _NAME.fullmatch(text)
    return Name(int(found[1]), found[2], int(found[3]), found[4]) if found else None


def belongs_to(name: Name | None, token: str, digest: str) -> bool:
    """Whether a start with this token made a part with this name and SHA-256."""
    if name is None:
        return False
    return seals.unseal(token.encode(), _about(*name[:3]), f"{name.code} {digest}") is not None


def path_of(key_path: Any) -> str:
    """A leaf's path, such as `params/mlp/kernel`; no two leaves of a tree have the same."""
    names = (jax.tree_util.keystr((key,), simple=True) for key in key_path)
    return "/".join(name.replace("/", "\\/") for name in names)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with regular.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def entries(tree: Any, process: int) -> dict[str, list[Entry]]:
    """The contents of the part `ALL` and of a process's part, for a tree of arrays or shapes."""
    found: dict[str, list[Entry]] = {ALL: [], str(process): []}
    for key, leaf in jax.tree.leaves_with_path(tree):
        for spans, (holders, is_everywhere) in _holders(leaf.sharding, leaf.shape).items():
            if process in holders:
                part = ALL if is_everywhere else str(process)
                found[part].append(Entry(path_of(key), str(leaf.dtype), spans))
    return found


def cut(tree: Any, process: int) -> dict[str, list[tuple[Entry, np.ndarray]]]:
    """Copies this process's parts of a tree off its devices; then the buffers may be donated."""
    shards: dict[tuple[str, Spans], jax.Array] = {}
    for key, leaf in jax.tree.leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            shards.setdefault((path_of(key), _spans(shard.index, leaf.shape)), shard.data)
    for data in shards.values():
        data.copy_to_host_async()
    copy = lambda entry: np.array(shards[entry.path, entry.spans])
    return {
        part: [(entry, copy(entry)) for entry in held]
        for part, held in entries(tree, process).items()
    }


def write(
    folder: Path,
    token: str,
    step: int,
    part: str,
    count: int,
    held: Sequence[tuple[Entry, np.ndarray]],
    record: dict[str, Any],
) -> Path:
    """Writes a part into a folder, with one rename at the end, and returns its path.

    Args:
      folder: The folder.
      token: Token of this start.
      step: The step.
      part: `ALL`, or the number of a process.
      count: Number of processes.
      held: From `cut`.
      record: More about the step, as JSON values.

    Raises:
      OSError: If it cannot be written; then nothing of it is left.
    """
    header = {"entries": [entry for entry, _ in held], "record": record}
    pieces: list[Any] = [json.dumps(header).encode() + b"\n"]
    # Some dtypes, such as bfloat16, have no buffer of their own.
    pieces += [array.reshape(-1).view(np.uint8) for _, array in held if array.size]
    made = hashlib.sha256()
    for piece in pieces:
        made.update(piece)
    about = _about(step, part, count)
    code, _, _ = seals.seal(token.encode(), about, made.hexdigest()).partition(" ")
    partial = folder / f"{about}.part"
    try:
        with partial.open("wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:  # an unbuffered file may write less than it was given
                    view = view[file.write(view) :]
        return partial.rename(folder / f"{about}.{code}")
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[list[tuple[Entry, np.ndarray]], dict[str, Any]]:
    """The contents of a part, its arrays mapped from the file, and its record.

    Raises:
      ValueError: If it is not a part.
    """
    with regular.open_file(path) as file:
        line = file.readline(LONGEST)
    header = seals.json_object(line) or {}
    rows, record = header.get("entries"), header.get("record")
    entries = [_entry(row) for row in rows] if isinstance(rows, list) else [None]
    made = [entry for entry in entries if entry is not None]
    if len(made) < len(entries) or not isinstance(record, dict):
        raise ValueError(f"{path} is not a part of a state.")
    if path.stat().st_size != len(line) + sum(entry.nbytes for entry in made):
        raise ValueError(f"{path} is not of the size that it names.")
    found, at = [], len(line)
    for entry in made:
        data = np.zeros(0, np.uint8)  # an empty file cannot be mapped
        if entry.nbytes:
            data = np.memmap(path, np.uint8, "r", at, entry.nbytes)
        found.append((entry, data.view(jnp.dtype(entry.dtype)).reshape(entry.shape)))
        at += entry.nbytes
    return found, record


def _entry(row: Any) -> Entry | None:
    """Reads what a part says of a piece; None for anything else, as a dtype with pointers."""
    if not isinstance(row, list) or [type(part) for part in row] != [str, str, list]:
        return None
    name, dtype, spans = row
    try:
        is_number = jnp.issubdtype(jnp.dtype(dtype), jnp.number) or dtype == "bool"
    except TypeError:
        return None
    are_numbers = lambda span: isinstance(span, list) and [type(x) for x in span] == [int, int]
    is_span = lambda span: are_numbers(span) and 0 <= span[0] <= span[1] < 2**63
    if not is_number or not all(map(is_span, spans)):
        return None
    return Entry(name, dtype, tuple(map(tuple, spans)))


def assembled(like: Any, held: Sequence[tuple[Entry, np.ndarray]]) -> Any:
    """Assembles pieces to arrays with the shapes, dtypes and shardings of `like`.

    Raises:
      ValueError: If a piece is missing that this process needs.
    """
    found: dict[str, dict[Spans, np.ndarray]] = {}
    for entry, data in held:
        found.setdefault(entry.path, {}).setdefault(entry.spans, data)

    def one(key, leaf):
        region = _region(path_of(key), found.get(path_of(key), {}), leaf)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: region(_spans(index or (), leaf.shape))
        )

    return jax.tree.map_with_path(one, like)


def _region(path: str, pieces: dict[Spans, np.ndarray], leaf: Any) -> Callable[[Spans], np.ndarray]:
    """A function that copies a region of an array from its disjoint pieces."""

    @functools.cache
    def region(wanted):
        made, filled = np.empty([stop - start for start, stop in wanted], leaf.dtype), 0
        for spans, data in pieces.items():
            both = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, spans, strict=True)
            )
            if all(start < stop for start, stop in both):
                made[_inside(wanted, both)] = data[_inside(spans, both)]
                filled += math.prod(stop - start for start, stop in both)
        if filled != made.size:
            raise ValueError(f"{made.size - filled:,} entries of {path} are in no part.")
        return made

    return region


def _inside(whole: Spans, both: Spans) -> tuple[slice, ...]:
    """The place of a part inside its region."""
    return tuple(
        slice(start - first, stop - first)
        for (first, _), (start, stop) in zip(whole, both, strict=True)
    )


def _about(step: int, part: str, count: int) -> str:
    return f"{step}-{part}-of-{count}"


@functools.cache
def _holders(sharding: Any, shape: tuple[int, ...]) -> dict[Spans, tuple[set[int], bool]]:
    """The processes that hold each piece of an array, and whether these are all processes."""
    found: dict[Spans, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(_spans(index, shape), set()).add(device.process_index)
    everybody = {device.process_index for device in sharding.device_set}
    return {spans: (holders, holders == everybody) for spans, holders in found.items()}


def _spans(index: tuple[slice, ...], shape: tuple[int, ...]) -> Spans:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
