"""Layers in turn: what each gather waits for; gradients and bytes are those without lookahead."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from tests.helpers.layered import block as residual_block
from tests.helpers.layered import make_params
from tests.helpers.replicas import everywhere, mesh_of

NUM_LAYERS = 4
CODE = jaxcomp.quantize(8, block=64, range="minmax")


def block(p, x):
    """Of float32 weights or others, with the same result."""
    return residual_block(jax.tree.map(lambda w: w.astype(x.dtype), p), x)


def make(form, lookahead, *sizes, **options):
    """A mesh, a QSDP and shards of layers, in a list or stacked."""
    mesh = mesh_of(*sizes, second="fast")
    fast_axis = "fast" if len(sizes) > 1 else None
    fsdp = jaxcomp.qsdp("replica", CODE, CODE, fast_axis=fast_axis, lookahead=lookahead, **options)
    params = make_params(NUM_LAYERS)["layers"]
    if form == "stack":
        params = jax.tree.map(lambda *layers: np.stack(layers), *params)
    stacked = lambda *_: form == "stack"
    return mesh, fsdp, fsdp.shard(everywhere(mesh, params), mesh, stacked)


def one_by_one(fsdp, trees, x):
    """What `layers` is without a lookahead: each layer by itself."""
    layer = fsdp.layer(block)
    if isinstance(trees, list):
        for tree in trees:
            x = layer(tree, x)
        return x
    return lax.scan(lambda x, tree: (layer(tree, x), None), x, trees)[0]


def gradient(fsdp, mesh, run, dtype="float32"):
    """A jitted function of shards and the layers' input: the loss, and gradients at both."""

    def loss(shards, x):
        count = x[0, 0].astype(jnp.int32)  # XLA must not know that it is no negative number
        x = jaxcomp.replicas.types.to_varying(x, fsdp.axes).astype(dtype)
        y = run(fsdp.local(shards, count), x)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def own(shards, x):
        value, grads = jax.value_and_grad(loss, argnums=(0, 1))(shards, x)
        return value[None], grads

    specs = (P(fsdp.axes), P())
    grads = P(fsdp.axes), P()  # the input's is summed over the replicas
    mapped = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=(P(fsdp.axes), grads))
    return jax.jit(mapped)


def inputs():
    return np.random.default_rng(7).normal(size=(6, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("form", "sizes", "secondary"), [("list", (3,), False), ("stack", (2, 2), True)]
)
def test_a_lookahead_changes_no_gradient_and_no_byte(form, sizes, secondary):
    def found(lookahead, run):
        mesh, fsdp, shards = make(form, lookahead, *sizes, secondary=secondary)
        compiled = gradient(fsdp, mesh, functools.partial(run, fsdp)).lower(shards, inputs())
        compiled = compiled.compile()
        sent = {axis: report.sent_bytes(compiled, mesh, axis) for axis in mesh.axis_names}
        return compiled(shards, inputs()), sent

    (loss, grads), sent = found(0, one_by_one)
    assert np.abs(jax.tree.leaves(grads)[0]).max() > 0
    for lookahead in (0, 1, 2):
        (own, of_own), own_sent = found(lookahead, lambda fsdp, *given: fsdp.layers(block)(*given))
        assert own_sent == sent
        np.testing.assert_array_equal(own, loss)
        # The programs may fuse a multiplication with an addition differently.
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
        jax.tree.map(close, of_own, grads)


@pytest.mark.parametrize(("num_layers", "lookahead"), [(1, 2), (2, 2), (3, 1)])
def test_a_stack_of_any_length_is_what_the_list_is(num_layers, lookahead):
    def found(form):
        mesh, fsdp, shards = make(form, lookahead, 2)
        first = lambda trees: jax.tree.map(lambda x: x[:num_layers], trees)
        cut = (lambda trees: trees[:num_layers]) if form == "list" else first
        run = lambda trees, x: fsdp.layers(block)(cut(trees), x)
        loss, (grads, of_x) = gradient(fsdp, mesh, run)(shards, inputs())
        if form == "list":
            grads = jax.tree.map(lambda *layers: np.stack(layers, axis=1), *grads)
        return loss, jax.tree.leaves(grads), of_x

    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, found("stack"), found("list"))


@pytest.mark.parametrize("form", ["list", "stack"])
def test_random_keys_go_from_layer_to_layer(form):
    def dropped(p, given):
        x, key = given
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(kept, block(p, x), x), jax.random.fold_in(key, 1)

    def found(run_of):
        mesh, fsdp, shards = make(form, 1, 2)
        run = lambda trees, x: run_of(fsdp)(trees, (x, jax.random.key(3)))[0]
        return gradient(fsdp, mesh, run)(shards, inputs())

    def one_by_one(fsdp):
        at = lambda trees, i: trees[i] if form == "list" else jax.tree.map(lambda x: x[i], trees)

        def run(trees, given):
            for i in range(NUM_LAYERS):
                given = dropped(fsdp.gather(at(trees, i)), given)
            return given

        return run

    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, found(lambda fsdp: fsdp.layers(dropped)), found(one_by_one))


@pytest.mark.parametrize("form", ["list", "stack"])
def test_weights_come_in_the_type_that_computes_and_vectors_in_their_own(form):
    mesh, fsdp, shards = make(form, 1, 2)
    seen = []

    def typed(p, x):
        seen.append({name: w.dtype.name for name, w in p.items()})
        return block(p, x)

    grads = {}
    for dtype in (None, "bfloat16"):
        run = fsdp.layers(typed, dtype)
        grads[dtype] = gradient(fsdp, mesh, run, "bfloat16")(shards, inputs())[1]
        want = {name: dtype if dtype and name in ("up", "down") else "float32" for name in seen[0]}
        assert seen and all(types == want for types in seen)
        assert form == "stack" or len(seen) == 2  # layers alike are traced once in each pass
        seen.clear()
    # Cast by the layer or decoded so, weights are the same, and gradients as of float32 weights.
    jax.tree.map(np.testing.assert_array_equal, grads["bfloat16"], grads[None])


def dependencies(jaxpr):
    """Of each gather in a jaxpr the products that its operand depends on, and how many there are.

    Products are numbered as they come; those inside of one loop count as one. Gathers have the
    numbers -1, -2 and so on. What is inside of a `jax.jit` counts as if it stood in its place.
    """
    gathers, count = [], 0

    def outputs(jaxpr, given):
        nonlocal count
        known = dict(zip(jaxpr.invars, given, strict=True))
        before = lambda var: known.get(var, frozenset()) if not hasattr(var, "val") else frozenset()
        for eqn in jaxpr.eqns:
            inputs = [before(var) for var in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                found = outputs(eqn.params["jaxpr"].jaxpr, inputs)
                known.update(zip(eqn.outvars, found, strict=True))
                continue
            after = frozenset().union(*inputs)
            text = str(eqn) if eqn.primitive.name != "dot_general" else "dot_general"
            if "all_gather" in text:
                assert eqn.primitive.name.startswith("all_gather"), "a gather inside of a call"
                gathers.append(after)
                after |= {-len(gathers)}
            if "dot_general" in text:
                after |= {count}
                count += 1
            known.update(dict.fromkeys(eqn.outvars, after))
        return [before(var) for var in jaxpr.outvars]

    outputs(jaxpr, [frozenset()] * len(jaxpr.invars))
    return gathers, count


def inner(jaxpr):
    """The jaxpr inside of `shard_map`."""
    [eqn] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("jit", "pjit", "shard_map")]
    found = eqn.params["jaxpr"]
    found = getattr(found, "jaxpr", found)
    return found if eqn.primitive.name == "shard_map" else inner(found)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_gather_waits_for_the_input_of_the_layer_so_many_places_before(lookahead):
    mesh, fsdp, shards = make("list", lookahead, 2)
    grad = gradient(fsdp, mesh, fsdp.layers(block))
    jaxpr = inner(jax.make_jaxpr(grad)(shards, inputs()).jaxpr)
    gathers, num_products = dependencies(jaxpr)
    # Two products forward; backward two to compute again, and two each for weights and inputs.
    assert len(gathers) == 2 * NUM_LAYERS and num_products == 8 * NUM_LAYERS
    for number, before in enumerate(gathers[1:]):
        assert -number - 1 in before  # else XLA may join the two
    gathers = [{product for product in before if product >= 0} for before in gathers]
    forward, backward = gathers[:NUM_LAYERS], gathers[NUM_LAYERS:]
    for layer, products in enumerate(forward):
        assert len(products) == 2 * max(0, layer - lookahead)
    # First behind the result of the forward pass, then behind the gradients of so many layers.
    ahead = 2 * NUM_LAYERS - 1
    for place, products in enumerate(backward):
        done = {product for product in products if product >= 2 * NUM_LAYERS}
        layers_done = {(product - 2 * NUM_LAYERS) // 6 for product in done}
        assert ahead in products
        assert layers_done == set(range(max(0, place - lookahead)))


@pytest.mark.parametrize("lookahead", [1, 2])
def test_in_a_loop_no_gather_depends_on_what_the_same_round_computes(lookahead):
    mesh, fsdp, shards = make("stack", lookahead, 2)
    grad = gradient(fsdp, mesh, fsdp.layers(block))
    jaxpr = inner(jax.make_jaxpr(grad)(shards, inputs()).jaxpr)
    loops = [eqn for eqn in jaxpr.eqns if "all_gather" in str(eqn) and eqn.primitive.name == "scan"]
    assert len(loops) == 2
    for eqn in loops:
        body = eqn.params["jaxpr"].jaxpr
        gathers, num_products = dependencies(body)
        assert gathers == [frozenset()] and num_products in (2, 6)


@pytest.mark.parametrize("form", ["list", "stack"])
def test_whole_weights_are_computed_with_as_they_are(form):
    params = make_params(NUM_LAYERS)["layers"]
    x = want = inputs()
    for layer in params:
        want = block(layer, want)
    if form == "stack":
        params = jax.tree.map(lambda *layers: np.stack(layers), *params)
    got = jaxcomp.qsdp("replica").layers(block)(params, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="lookahead is 3; write 0, 1 or 2"):
        jaxcomp.qsdp("replica", lookahead=3)
    mesh, fsdp, shards = make("list", 1, 2)
    one_tree = lambda trees, x: fsdp.layers(block)(trees[0], x)
    with pytest.raises(ValueError, match="give a list of trees"):
        gradient(fsdp, mesh, one_tree)(shards, inputs())
    mesh, fsdp, shards = make("stack", 1, 2)
    fewer = shards | {"down": jax.tree.map(lambda x: x[:, :3], shards["down"])}
    with pytest.raises(ValueError, match=r"stacks of \[3, 4\] layers"):
        gradient(fsdp, mesh, lambda trees, x: fsdp.layers(block)(trees, x))(fewer, inputs())
    assert dataclasses.replace(fsdp, lookahead=0) != fsdp
