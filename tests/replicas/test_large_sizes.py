"""Arrays of more entries than 32 bits can number, by their shapes alone: no position wraps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

import jaxcomp
from jaxcomp.compressors import blocks
from jaxcomp.compressors.base import Key
from jaxcomp.replicas.shards import entries_of, numel_of, without_padding

LARGE = 2**33 + 3
KEY = Key(jnp.int32(3), jnp.uint32(7))


@pytest.mark.parametrize("numel", [5, 2**31 + 1, 2**32 + 5, LARGE])
@pytest.mark.parametrize("num_shards", [3, 4, 8])
def test_a_shard_ends_where_its_parameter_does(numel, num_shards):
    size = numel_of((numel,), num_shards)
    owners = jnp.arange(num_shards)
    got = jax.jit(jax.vmap(lambda owner: entries_of(owner, size, numel)))(owners)
    want = [min(max(numel - owner * size, 0), size) for owner in range(num_shards)]
    assert got.tolist() == want and sum(want) == numel


def equations(jaxpr):
    """All equations of a program, those of the functions that it calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def starts(equation):
    """`(dtype of indices, greatest one)` for each axis that an equation is indexed along."""
    operand, *indices = (x.aval for x in equation.invars)
    if equation.primitive.name == "dynamic_slice":
        sizes, axes = equation.params["slice_sizes"], range(operand.ndim)
        dtypes = [index.dtype for index in indices]
    elif equation.primitive.name == "gather":
        sizes = equation.params["slice_sizes"]
        axes = equation.params["dimension_numbers"].start_index_map
        dtypes = [indices[0].dtype] * len(axes)
    else:  # a scatter of single entries
        sizes = operand.ndim * [1]
        axes = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
        dtypes = [indices[0].dtype] * len(axes)
    greatest = [operand.shape[axis] - sizes[axis] for axis in axes]
    return zip(dtypes, greatest, strict=True)


def assert_no_position_wraps(function, *args):
    # A choice by platform of an empty tree has no result.
    for equation in filter(lambda e: e.outvars, equations(jax.make_jaxpr(function)(*args).jaxpr)):
        name, out = equation.primitive.name, equation.outvars[0].aval
        found = []
        if name == "iota" and jnp.issubdtype(out.dtype, jnp.integer):
            found = [(out.dtype, out.shape[equation.params["dimension"]] - 1)]
        elif name in ("gather", "dynamic_slice") or name.startswith("scatter"):
            found = starts(equation)
        for dtype, greatest in found:
            assert greatest <= np.iinfo(dtype).max, equation


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def on_replicas(function, num_replicas):
    return jax.vmap(function, axis_name="replica", axis_size=num_replicas)


@pytest.mark.parametrize("numel", [2**31 + 1, 2**32 + 5, LARGE])
def test_padding_is_cleared_in_shards_of_any_parameter(numel):
    clear = on_replicas(lambda piece: without_padding(piece, numel, "replica"), 4)
    assert_no_position_wraps(clear, floats(4, numel_of((numel,), 4)))


@pytest.mark.parametrize(
    "compressor",
    [
        jaxcomp.random_k(0.1),
        jaxcomp.random_k(0.1, "strided"),
        jaxcomp.random_k(0.25, "random"),
        jaxcomp.top_k(0.001, block=4096),
        jaxcomp.group_top_1(8),
        jaxcomp.sign(block=128),
        jaxcomp.sign(),
        jaxcomp.quantize(4),
        jaxcomp.compose(jaxcomp.random_k(0.1), jaxcomp.group_top_1(8), jaxcomp.quantize(4)),
    ],
    ids=lambda compressor: compressor.name,
)
def test_codes_know_every_position(compressor):
    encode = lambda x: compressor.encode(x, KEY, KEY)
    assert_no_position_wraps(encode, floats(LARGE))
    payload = jax.eval_shape(encode, floats(LARGE))
    assert_no_position_wraps(lambda payload: compressor.decode(payload, KEY), payload)


WHOLE = {"bucket_numel": 2**40}
TENTH = jaxcomp.two_shot(jaxcomp.random_k(0.1), **WHOLE)
EXACT = jaxcomp.two_shot(jaxcomp.identity(), **WHOLE)


# Of `rows[index]`, where only the index among the rows is not a constant.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")
@pytest.mark.parametrize(
    "tx",
    [
        jaxcomp.slamb(1e-3, "replica", compressor=TENTH, drift_compressor=EXACT),
        jaxcomp.sharded_optimizer(
            optax.sgd(1.0),
            "replica",
            gradients=jaxcomp.two_shot(jaxcomp.quantize(4, rounding="stochastic"), **WHOLE),
            differences=jaxcomp.two_shot(jaxcomp.quantize(4), **WHOLE),
        ),
        jaxcomp.cocktail_sgd(optax.sgd(1.0), "replica", compressor=TENTH, warmup_steps=1),
    ],
    ids=["slamb", "sharded_optimizer", "cocktail_sgd"],
)
def test_methods_know_every_position(tx):
    def step(params, grads):
        return tx.update(grads, tx.init(params), params)

    leaf = {"w": floats(3, 2, LARGE // 2)}
    assert_no_position_wraps(on_replicas(step, 3), leaf, leaf)


@pytest.mark.parametrize("pattern", ["strided", "random"])
@pytest.mark.parametrize("numel", [999, 1000, 1024])
def test_pieces_of_a_bucket_are_decoded_as_the_whole(monkeypatch, pattern, numel):
    compressor = jaxcomp.random_k(0.1, pattern)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(numel, np.float32))
    payload = compressor.encode(x, KEY, KEY)
    whole = compressor.decode(payload, KEY)
    monkeypatch.setattr(blocks, "_INDEXED", 64)
    assert len(blocks.indexed(numel)) == 16
    np.testing.assert_array_equal(compressor.decode(payload, KEY), whole)
    np.testing.assert_array_equal(whole, jnp.where(whole == 0, 0, x))
    assert np.count_nonzero(whole) in (numel // 10, numel // 10 + 1)


@pytest.mark.parametrize("numel", [2**31, 2**32 + 5, LARGE])
def test_pieces_begin_at_whole_strides_and_are_small_enough(numel):
    pieces = blocks.indexed(numel, 10)
    assert [piece.stop for piece in pieces] == [*(p.start for p in pieces[1:]), numel]
    assert all(p.start % 10 == 0 and p.stop - p.start < 2**31 for p in pieces)
