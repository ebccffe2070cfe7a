"""Packing: sequences of whole documents, which do not attend to each other."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from train.data.token_files import Part


class Packed(NamedTuple):
    """Documents in sequences.

    Attributes:
      part: The documents.
      starts: i64[sequences], the start of each in the part's tokens.
      context: Tokens to predict in a sequence.
    """

    part: Part
    starts: np.ndarray
    context: int


def pack(part: Part, context: int) -> Packed:
    """Packs documents into sequences, in their order on disk.

    A sequence takes documents as long as they fit. A document of more than `context + 1` tokens is
    cut. Each piece begins with the last token of the previous one, so that every token of a
    document except the first is predicted once.
    """
    starts, start = [], 0
    while start < part.tokens.size:
        starts.append(start)
        stop = _stop(part.ends, start, context)
        start = stop if stop == _end_before(part.ends, stop) else stop - 1
    return Packed(part, np.array(starts, np.int64), context)


def batch(
    packed: Packed, seed: int, seen: int, batch_size: int, rows: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Makes the sequences of one step: a pure function of its arguments.

    Every epoch has each sequence once, in a new order; a batch may span two epochs. A row does not
    depend on the process that makes it.

    Args:
      packed: From `pack`.
      seed: Seed of the run.
      seen: Number of sequences in earlier steps.
      batch_size: Sequences of the whole step.
      rows: Which of them to make.

    Returns:
      Arrays of [rows, context]: "tokens" and "targets", i32; "documents", i32, the number of each
      token's document in the sequence, from 1, and 0 for padding; "positions", i32, which count
      from 0 in each document; "weights", f32, 0 without a target. With other weights the mean over
      all rows of the batch is the mean over its targets, however rows are divided among replicas.
    """
    size = packed.starts.size
    numbers = tuple(
        shuffled(place % size, size, f"{seed} {place // size}")
        for place in range(seen, seen + batch_size)
    )
    return _made(packed, numbers, rows)


def validation_batch(
    packed: Packed, index: int, num_batches: int, batch_size: int, rows: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Makes one of the fixed validation batches: sequences evenly spaced over all of them.

    They are the same for every run, seed and step. Sequences repeat only if there are too few.
    Arguments are those of `texts.validation_batch`, the result is that of `batch`.
    """
    first = index * batch_size
    numbers = evenly_spaced(packed, num_batches * batch_size)[first : first + batch_size]
    return _made(packed, numbers, rows)


def evenly_spaced(packed: Packed, total: int) -> tuple[int, ...]:
    """Numbers of `total` sequences that are evenly spaced over all."""
    return tuple(place * packed.starts.size // total for place in range(total))


def has_targets(packed: Packed, numbers: Iterable[int]) -> bool:
    """Whether any of these sequences has a token to predict; looks no further than the first."""
    return any(_mask(packed, number).any() for number in numbers)


def shuffled(number: int, size: int, key: str) -> int:
    """The place of a number in [0, size) after a shuffle with `key`, without a table.

    Four rounds of a Feistel network, Luby and Rackoff, "How to construct pseudorandom permutations
    from pseudorandom functions", 1988, on the least even number of bits; a result that is too large
    is shuffled again.
    """
    half = -(-(size - 1).bit_length() // 2)
    while True:
        left, right = number >> half, number & ((1 << half) - 1)
        for turn in range(4):
            word = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(word) & ((1 << half) - 1))
        number = left << half | right
        if number < size:
            return number


def _end_before(ends: np.ndarray, place: int) -> int:
    """The last document end at or before `place`; 0 if there is none."""
    number = int(np.searchsorted(ends, place, "right"))
    return int(ends[number - 1]) if number else 0


def _stop(ends: np.ndarray, start: int, context: int) -> int:
    stop = _end_before(ends, start + context + 1)
    return stop if stop > start else start + context + 1


def _made(packed: Packed, numbers: tuple[int, ...], rows: slice) -> dict[str, np.ndarray]:
    """The requested rows of a batch of these sequences, see `batch`."""
    masks = [_mask(packed, number) for number in numbers]
    scale = np.float32(len(masks) * packed.context / max(1, sum(mask.sum() for mask in masks)))
    made = [_row(packed, number) for number in numbers[rows]]
    arrays = {
        name: np.array([row[name] for row in made], np.int32).reshape(-1, packed.context)
        for name in ("tokens", "targets", "documents", "positions")
    }
    weights = np.array(masks[rows], np.float32).reshape(-1, packed.context) * scale
    return arrays | {"weights": weights}


def _span(packed: Packed, number: int) -> tuple[slice, np.ndarray]:
    """A sequence's place in the part, and the number of each token's document, from 1."""
    start = int(packed.starts[number])
    stop = _stop(packed.part.ends, start, packed.context)
    first, last = np.searchsorted(packed.part.ends, (start, stop), "right")
    ends = packed.part.ends[first:last]
    return slice(start, stop), 1 + np.searchsorted(ends, np.arange(start, stop), "right")


def _filled(packed: Packed, values: np.ndarray) -> np.ndarray:
    return np.pad(values, (0, packed.context + 1 - values.size))


def _mask(packed: Packed, number: int) -> np.ndarray:
    """bool[context]: whether the next token is a target; it must be of the same document."""
    place, documents = _span(packed, number)
    mask = documents[1:] == documents[:-1]
    if packed.part.asked is not None:
        mask &= packed.part.asked[place][1:]
    return _filled(packed, mask)[:-1]


def _row(packed: Packed, number: int) -> dict[str, np.ndarray]:
    place, documents = _span(packed, number)
    tokens = _filled(packed, packed.part.tokens[place])
    first = np.searchsorted(documents, documents, "left")  # the start of each token's document
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "documents": _filled(packed, documents)[:-1],
        "positions": _filled(packed, np.arange(documents.size) - first)[:-1],
    }
