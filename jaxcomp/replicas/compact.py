"""Keeps residuals and moments in 8 or 16 bits between the steps, to save memory."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp._checks import require_static
from jaxcomp.replicas.protocol import with_extra_args


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compact:
    """A floating array in fewer bits: `int8` with one scale per row, or `bfloat16`."""

    data: jax.Array  # of the array's shape
    scale: jax.Array | None  # [..., 1], in the array's dtype; None beside bfloat16
    dtype: Any = dataclasses.field(metadata={"static": True})  # the array's


def compact(
    tx: optax.GradientTransformation, bits: int = 8, *, fields: Sequence[str] = ("residual",)
) -> optax.GradientTransformationExtraArgs:
    """Keeps parts of a state in fewer bits between the steps; by default the residual.

    At 8 bits each row along a leaf's last axis is rounded to nearest, in steps of 1/127 of its
    largest magnitude. The rounding error is lost, so error feedback is exact only up to it. The
    rest of the state, `owner_residual` included, stays as it is.

    First moments may be kept in 16 bits too. Second moments may not: a step changes a variance by
    a factor 1 - b2, which is less than half of bfloat16's last bit, so with rounding to nearest it
    would never shrink. At 8 bits an error of 1/254 of a row's largest value would be divided by the
    root of each entry's own variance.

    Args:
      tx: A transformation with such fields in its state, or a chain with one: `compressed_mean`,
        `one_bit_adam`, `zero_one_adam`, `one_bit_lamb`.
      bits: Bits of one value: 8, or 16 for bfloat16.
      fields: Names of the state fields to keep in fewer bits: `("residual", "momentum")` for the
        methods of this library, `("residual", "mu")` for optax's Adam after a mean, or
        `("remainder",)` for `jaxcomp.master_weights`.

    Returns:
      A `GradientTransformationExtraArgs` whose state is that of `tx` with a `Compact` in place of
      each floating leaf of `fields`; `jaxcomp.resize` and checkpoints handle it. At 8 bits it saves
      3 bytes per value and costs 4 bytes per row; at 16 bits it saves 2 bytes per value.

    Raises:
      ValueError: If `bits` is another number, or 8 for more than the residual; if `fields` names
        second moments, or a drift, which steps read; at `init`, if a field has nothing to keep.

    Examples:
      >>> import jaxcomp
      >>> tx = jaxcomp.compact(jaxcomp.one_bit_adam(1e-3, "replica", freeze_step=100), bits=8)
    """
    require_static("compact", "optax.chain(mean, optax.adam(learning_rate))", bits=bits)
    if bits not in (8, 16):
        raise ValueError(f"compact got bits={bits}; write 8, or 16 for bfloat16.")
    if refused := sorted(_WIDE.intersection(fields)):
        raise ValueError(
            f"compact got fields={tuple(fields)}, but {refused} must stay in float32: a variance "
            "in few bits never shrinks, and steps add a drift to parameters; write, for example, "
            "fields=('residual', 'momentum')."
        )
    if bits == 8 and set(fields) != {"residual"}:
        raise ValueError(
            f"compact got bits=8 and fields={tuple(fields)}, but only a residual may be so coarse, "
            "whose error is sent later; for moments and remainders write bits=16."
        )
    tx = with_extra_args(tx, "compact")
    pack = functools.partial(_packed, frozenset(fields), bits)

    def init(params):
        state = tx.init(params)
        for name in fields:
            if not jax.tree.leaves(_values(state, name)):
                raise ValueError(
                    f"compact got a transformation whose state has no {name} to keep; leave it out."
                )
        return pack(state)

    def update(updates, state, params=None, **extra_args):
        decoded = jax.tree.map(decode, state, is_leaf=is_compact)
        updates, new = tx.update(updates, decoded, params, **extra_args)
        return updates, jax.tree.map(_keep_dtype, state, pack(new), is_leaf=is_compact)

    return optax.GradientTransformationExtraArgs(init, update)


_WIDE = frozenset({"variance", "fresh_variance", "nu", "drift"})


def _packed(names: frozenset[str], bits: int, tree: Any) -> Any:
    """A state whose fields with these names are encoded, in every NamedTuple in it."""
    has = lambda x: not names.isdisjoint(getattr(x, "_fields", ()))

    def leaf(x):
        return encode(x, bits) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def node(x):
        if not has(x):
            return x
        new = {
            name: jax.tree.map(leaf, value) if name in names else _packed(names, bits, value)
            for name, value in x._asdict().items()
        }
        return x._replace(**new)

    return jax.tree.map(node, tree, is_leaf=has)


def _keep_dtype(old, new):
    """The new value, a compact one of the old dtype: `optax.inject_hyperparams` makes it wider."""
    return dataclasses.replace(new, dtype=old.dtype) if is_compact(old) else new


def _values(state: Any, name: str) -> list[Any]:
    """The values of all fields with this name, of the NamedTuples in a state."""
    is_field = lambda path, _: path and isinstance(path[-1], optax.tree_utils.NamedTupleKey)
    return [value for _, value in optax.tree_utils.tree_get_all_with_path(state, name, is_field)]


def is_compact(x: Any) -> bool:
    """Whether a node of a tree is a `Compact`."""
    return isinstance(x, Compact)


def encode(x: jax.Array, bits: int) -> Compact:
    """Rounds an array to 8 or 16 bits per value; NaN and infinities become NaN."""
    if bits == 16:
        return Compact(x.astype(jnp.bfloat16), None, x.dtype)
    scale = jnp.max(jnp.abs(x), axis=-1 if x.ndim else None, keepdims=True, initial=0) / 127
    data = jnp.round(x / jnp.where(scale > 0, scale, 1))
    return Compact(data.astype(jnp.int8), scale, x.dtype)


def decode(x: Any) -> Any:
    """Undoes `encode` up to rounding; anything but a `Compact` is returned as it is."""
    if not is_compact(x):
        return x
    data = x.data.astype(x.dtype)
    return data if x.scale is None else data * x.scale
