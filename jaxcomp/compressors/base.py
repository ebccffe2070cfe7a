"""What a compressor is, and the identity."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

SCALE_DTYPES = ("bfloat16", "float16", "float32")  # that scales can be sent in


class Key(NamedTuple):
    """Where the pseudo-randomness of one encoding comes from; `packing.fold` derives others.

    A *shared* key is equal on all replicas (masks, random shifts), a *private* one is a
    replica's own (stochastic rounding). `count` is the same in both.
    """

    # i32[], the step, for patterns that roll by one each step. Hides `tuple.count`.
    count: jax.Array | int  # type: ignore[assignment]
    seed: jax.Array | int  # u32[], hash of the run's seed, the step, the bucket (and the replica)
    levels: Any = None  # f32[2**bits], of a code with learned levels; of `fused`, one a part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Payload:
    """One encoded bucket. The leaves of `data` are exactly what is sent."""

    data: Any  # pytree of arrays
    numel: int = dataclasses.field(metadata={"static": True})  # of the bucket


class Levels(NamedTuple):
    """How a code's levels are learned; the code uses the levels in its shared key, if it has any.

    Attributes:
      start: `f32[2**bits]`, NumPy: the levels that it uses otherwise.
      tally: `(x: f32[numel]) -> f32[bins]`, what `fit` has to know about the values. Tallies of
        several buckets or replicas are added up.
      fit: `(levels: f32[2**bits], tally: f32[bins]) -> f32[2**bits]`, better levels for the tallied
        values, or the old ones if the tally is empty.
    """

    start: np.ndarray
    tally: Callable[[jax.Array], jax.Array]
    fit: Callable[[jax.Array, jax.Array], jax.Array]


class Entries(NamedTuple):
    """The entries of a bucket that a message lists; all others are zero."""

    values: jax.Array  # f32[k]
    places: jax.Array  # i32[k], all different; those beyond the bucket are of padding


class Selection(NamedTuple):
    """The two halves of a sparsifier: which entries of a bucket go on, and where they return.

    Attributes:
      kept: `numel -> k`, how many values are kept of a bucket of that size.
      select: `(x: f32[numel], shared: Key) -> (values: f32[k], where)`. `where` is the pytree
        that tells a receiver the positions; empty if it knows them from `shared`.
      scatter: `(values: f32[k], where, shared: Key, numel: int) -> f32[numel]`.
      density: Kept share of the entries of a large bucket, in (0, 1].
      position_bits: Bits of `where` per parameter of the bucket, at most.
      places: `(where, numel: int) -> i32[k]`, the positions, of a selection that may list them;
        it returns None for buckets of which it does not. None for others.
    """

    kept: Callable[[int], int]
    select: Callable[[jax.Array, Key], tuple[jax.Array, Any]]
    scatter: Callable[[jax.Array, Any, Key, int], jax.Array]
    density: float
    position_bits: float
    places: Callable[[Any, int], jax.Array | None] | None = None


@dataclasses.dataclass(frozen=True)
class Compressor:
    """A code for one flat float32 bucket: pure, of static shapes, without state.

    Two compressors are equal, and hash alike, if their names are. The name is the expression that
    makes the compressor, with every argument.

    Attributes:
      name: The call that makes it, such as `quantize(4, block=128)`.
      encode: `(x: f32[numel], shared: Key, private: Key) -> Payload`, for any numel >= 1.
      decode: `(payload, shared: Key) -> f32[numel]`, the receiver's estimate of `x`.
      bits_per_parameter: Payload bits over numel, for a bucket of whole blocks; an incomplete last
        block costs up to one block more.
      contraction: The largest alpha in (0, 1] for which
        `E|x - decode(encode(x))|^2 <= (1 - alpha) |x|^2` holds for every x; None if nothing is
        promised.
      unbiased: Whether `E decode(encode(x)) = x`, over the key's seed.
      linear: Whether the decoded sum of payloads is the sum of the decoded ones. Then
        payloads may be summed on the wire.
      selection: The two halves of a sparsifier, which `compose` uses; None for others.
      shared_selection: For a chain whose first stage keeps the same entries on all replicas: that
        stage's halves and the code of what it keeps, so that an exchange need not touch the
        rest; None for others.
      stages: The codes that `compose` has chained; empty for others.
      levels: How its levels are learned; None for a code whose levels are fixed.
      entries: `(payload, shared: Key) -> Entries`, of a code that may list them, so that a sum of
        messages needs no array for each; it returns None for payloads that list nothing. None
        for others.
    """

    name: str
    encode: Callable[[jax.Array, Key, Key], Payload] = dataclasses.field(compare=False)
    decode: Callable[[Payload, Key], jax.Array] = dataclasses.field(compare=False)
    bits_per_parameter: float = dataclasses.field(compare=False)
    contraction: float | None = dataclasses.field(compare=False, default=None)
    unbiased: bool = dataclasses.field(compare=False, default=False)
    linear: bool = dataclasses.field(compare=False, default=False)
    selection: Selection | None = dataclasses.field(compare=False, default=None)
    shared_selection: "tuple[Selection, Compressor] | None" = dataclasses.field(
        compare=False, default=None
    )
    stages: "tuple[Compressor, ...]" = dataclasses.field(compare=False, default=())
    levels: Levels | None = dataclasses.field(compare=False, default=None)
    entries: Callable[[Payload, Key], Entries | None] | None = dataclasses.field(
        compare=False, default=None
    )

    def __repr__(self) -> str:
        return self.name


def identity() -> Compressor:
    """Sends the float32 values themselves: 32 bits per parameter, exact and linear.

    `compressed_mean(identity(), ...)` is the uncompressed mean.
    """
    return Compressor(
        name="identity()",
        encode=lambda x, shared, private: Payload(x, x.size),
        decode=lambda payload, shared: payload.data,
        bits_per_parameter=32.0,
        contraction=1.0,
        unbiased=True,
        linear=True,
    )


def require_compressor(call: str, got: Any) -> None:
    """Raises a ValueError for anything but a compressor."""
    if not isinstance(got, Compressor):
        raise ValueError(f"{call} got {got!r}; needs a Compressor; write quantize(4).")
