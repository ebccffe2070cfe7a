"""A small GPT of Flax nnx on replica x fsdp x tensor, of Explicit axes, as `jax.make_mesh` has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomp
import jaxcomp.flax
from tests.helpers.every_method import METHODS
from tests.helpers.user_methods import PATIENCE, USER_METHODS

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 16, 16, 2, 8, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        q, k, v = map(split, jnp.split(self.qkv(self.norm(x)), 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(x)))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))[None]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(x)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


def batch_of(step):
    """Each token is the one before plus a stride, which is the first one's."""
    first = np.random.default_rng(step).integers(VOCABULARY, size=(BATCH, 1))
    return ((first % 3 + 1) * np.arange(LENGTH + 1) + first) % VOCABULARY


def spec(path, x):
    """Columns of what goes up and rows of what comes down over tensor; the rest over fsdp.

    Embeddings are whole: where an axis cuts both the table of a lookup and the batch, on a mesh of
    three axes, XLA's partitioner ends the process by a failed check.
    """
    name = jax.tree_util.keystr(path)
    if x.ndim < 2 or "embedding" in name:
        return P()
    return P("tensor", "fsdp") if "down" in name or "out" in name else P("fsdp", "tensor")


@functools.cache
def dense(steps):
    model = GPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, batch_of(i))) for i in range(steps)]


# Residuals, a drift, ratios of whole layers, and factors of matrices in shards; other kinds of
# state on this optimizer: test_nnx.py.
@pytest.mark.parametrize("method", ["mean", "sparse_loco", "one_bit_lamb", "power_sgd"])
def test_it_learns_as_by_dense_training_and_sends_codes_alone(method):
    names = ("replica", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Explicit,) * 3)
    model = GPT(nnx.Rngs(0))
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    specs = jax.tree_util.tree_map_with_path(spec, params)
    steps = range(40 * PATIENCE.get(method, 1))
    # In longer runs the rate falls: LAMB's steps would stay so long that single batches end far
    # above the others.
    rate = optax.linear_schedule(1e-2, 0.0, len(steps)) if method in PATIENCE else 1e-2
    tx = jaxcomp.flax.on_mesh(USER_METHODS[method](rate), mesh, "replica", param_specs=specs)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = jaxcomp.flax.train_step(loss_fn, batch_specs=P(("replica", "fsdp")))
    losses = [step(model, optimizer, batch_of(i))["loss"].mean() for i in steps]
    assert np.mean(losses[-5:]) < np.mean(dense(40)[-5:]) + 0.05 < 0.3 * losses[0]
    assert model.blocks[0].up.kernel[...].sharding.spec == P("fsdp", "tensor")

    program = step.lower(model, optimizer, batch_of(0)).compile()
    norms = [x for x in jax.tree.leaves(params) if x.ndim < 2]
    jaxcomp.assert_no_dense(
        program,
        mesh,
        "replica",
        exact=norms if method == "mean" else (),
        parts={part: params for part in METHODS[method].numbers} if method in METHODS else None,
    )
