"""What the leaves of a model are, by their paths and shapes: matrices, tables, heads, vectors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.replicas.layers import common_value

# Names of modules and arrays, between slashes, without the number that Flax adds: `Embed_0`.
_VECTOR = r"norm|^(ln|bn)(_|\d|$)|(^|_)(bias|scale|beta|gamma|gain)$"
_EMBEDDING = r"embed|(^|_)emb(_|$)|^(wte|wpe|pos|positions?)$|position(al)?_(bias|table|enc)"
_HEAD = r"^unembed|^embed_out$|^head$|(?<!multi)_head$|^(to_)?logits$|^(readout|classifier)$"
_AROUND = ("params", "model", "transformer")  # what may stand before the name of an output matrix


def leaf_kinds(params: Any) -> Any:
    """Tells matrices of blocks from embeddings, heads and vectors, by paths and shapes.

    Muon and low-rank methods are for matrices of blocks; Adam is for the rest. Rows of an embedding
    have a gradient only where their token occurs.

    Args:
      params: Parameters of any framework, or their gradients.

    Returns:
      A tree like `params`, of labels for `optax.partition`. The first that fits:

      - "vector": fewer than two axes longer than 1, or a name of norms, biases and scales, as
        `norm`, `ln_1`, `bias`: also `[heads, size]`, and such vectors stacked.
      - "head": the output matrix, as `lm_head`, `head`, `unembed`, `logits`, `embed_out`; and
        `output` where the path begins.
      - "embedding": tables of tokens and positions, as `embed`, `wte`, `position`; tied ones, too.
      - "matrix": the others.

      Experts, and layers stacked in one array, are one matrix here: wrap what uses the labels in
      `jaxcomp.per_layer`.

    Examples:
      >>> import jaxcomp
      >>> import jax.numpy as jnp
      >>> block = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
      >>> jaxcomp.leaf_kinds({"embed": jnp.ones((16, 4)), "block_0": block})
      {'block_0': {'up': {'bias': 'vector', 'kernel': 'matrix'}}, 'embed': 'embedding'}
    """
    label = lambda key_path, leaf: common_value(kind_of, key_path, leaf)
    return jax.tree.map_with_path(label, params)


def by_kind(
    others: optax.GradientTransformation,
    *,
    matrix: optax.GradientTransformation | None = None,
    embedding: optax.GradientTransformation | None = None,
    head: optax.GradientTransformation | None = None,
    vector: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Gives the leaves of each kind an optimizer of their own.

    Args:
      others: Optimizer of the leaves of all kinds that are not named.
      matrix: Optimizer of the matrices of blocks, see `jaxcomp.leaf_kinds`.
      embedding: Optimizer of the tables of tokens and positions.
      head: Optimizer of the output matrix.
      vector: Optimizer of norms, biases and scales.

    Returns:
      An `optax.partition` by the kinds that the parameters have. Each optimizer sees its leaves
      alone: norms for clipping are over these, and a method among them sends messages of its own.
      `train` refuses two methods that count their messages, as `zero_one_adam` and `slamb` do.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> mean = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
      >>> tx = jaxcomp.by_kind(
      ...     jaxcomp.slamb(1e-2, "replica"), embedding=optax.chain(mean, optax.lamb(1e-2))
      ... )
    """
    named = {"matrix": matrix, "embedding": embedding, "head": head, "vector": vector}
    named = {kind: tx for kind, tx in named.items() if tx is not None}

    def partition(tree):
        labels = jax.tree.map(lambda k: k if k in named else "others", leaf_kinds(tree))
        present = {"others": others, **named}
        present = {kind: present[kind] for kind in sorted(set(jax.tree.leaves(labels)))}
        return optax.partition(present, labels)

    def update(updates, state, params=None, **extra_args):
        return partition(updates).update(updates, state, params, **extra_args)

    init = lambda params: partition(params).init(params)
    return optax.GradientTransformationExtraArgs(init, update)


def kind_of(path: str, leaf: Any) -> str:
    """The label of one leaf, see `leaf_kinds`."""
    names = [re.sub(r"_\d+$", "", name) for name in _snake_case(path).split("/")]
    has = lambda pattern: any(re.search(pattern, name) for name in names)
    if sum(size > 1 for size in jnp.shape(leaf)) < 2 or has(_VECTOR):
        return "vector"
    if has(_HEAD) or [name for name in names if name not in _AROUND][:1] == ["output"]:
        return "head"
    return "embedding" if has(_EMBEDDING) else "matrix"


def _snake_case(path: str) -> str:
    """`MultiHeadDotProductAttention_0` as `multi_head_dot_product_attention_0`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path).lower()
