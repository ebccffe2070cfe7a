"""The check that nothing dense crosses an axis: steps that are wrong fail, and the text says why.

Steps that are right, one a method, are checked in `tests/methods/test_every_method.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers.hlo import loop, program
from tests.helpers.replicas import mesh_of

MEAN = jaxcomp.compressed_mean(jaxcomp.quantize(4, block=8), "replica")
SHAPES = {"bias": (16,), "kernel": (64, 16)}
SPECS = (P(), P("replica"))
PARAMS = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in SHAPES.items()}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["kernel"] + params["bias"][None]) ** 2)


def program_of(step, mesh, in_specs=SPECS, out_specs=SPECS[0]):
    """Compiles `step(params, batch)` in shard_map."""
    step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return jax.jit(step).lower(PARAMS, batch).compile()


def gradient(params, batch):
    """As in a step of one's own that forgot `local_params`: JAX sums it in float32."""
    return jax.grad(loss_fn)(params, batch)


def mean_of_gradients(params, batch):
    """As in a step that was written for dense training, before the compressed mean."""
    grads = lax.pmean(
        jax.grad(loss_fn)(jaxcomp.local_params(params, (), "replica"), batch), "replica"
    )
    return lax.pcast(grads, "replica", to="varying")


@pytest.mark.parametrize("wrong", [gradient, mean_of_gradients])
def test_a_dense_sum_of_gradients_is_told_with_bytes_types_cause_and_remedy(wrong):
    mesh = mesh_of(2)
    out_specs = P() if wrong is gradient else P("replica")
    program = program_of(wrong, mesh, out_specs=out_specs)
    with pytest.raises(AssertionError) as error:
        jaxcomp.assert_no_dense(program, mesh, "replica", exact=PARAMS["bias"])
    text = str(error.value)
    assert "across the axis 'replica'" in text
    assert "all-reduce of " in text and "f32[64,16]" in text and "over replica" in text
    # The sum of both leaves, or only what XLA sends of it by itself: 2 B (N-1) / N.
    assert "a replica sends 4,160 bytes" in text or "a replica sends 4,096 bytes" in text
    assert "once a step, from jit(" in text
    assert "local_params(params, state, 'replica')" in text and "pmean of gradients" in text
    assert "16 elements are named" in text
    # A dense step is no secret where it is meant.
    jaxcomp.assert_no_dense(program, mesh, "replica", exact=PARAMS)


def test_another_axis_and_what_stays_inside_of_it_are_not_looked_at():
    mesh = mesh_of(2, 2)
    program = program_of(
        lambda params, batch: jax.grad(loss_fn)(lax.pcast(params, "replica", to="varying"), batch),
        mesh,
        in_specs=(P(), P(("replica", "fsdp"))),
        out_specs=P("replica"),
    )
    jaxcomp.assert_no_dense(program, mesh, "replica")
    with pytest.raises(AssertionError, match="over fsdp: a replica sends"):
        jaxcomp.assert_no_dense(program, mesh, "fsdp")
    with pytest.raises(ValueError, match="axis 'data'"):
        jaxcomp.assert_no_dense(program, mesh, "data")


def test_exact_leaves_pass_by_name_only_and_cover_no_others():
    mesh = mesh_of(2)
    tx = jaxcomp.per_replica(optax.chain(MEAN, optax.sgd(0.1)), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)

    def step(params, state, batch):
        local = jaxcomp.local_params(params, state, "replica")
        loss, grads = jax.value_and_grad(loss_fn)(local, batch)
        updates, _ = tx.update(grads, state, params)
        # A user's own statistic, as of BatchNorm: 16 numbers more.
        return updates, lax.pmean(loss, "replica"), lax.pmean(batch[0, :16], "replica")

    step = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P("replica")), out_specs=(P(), P(), P())
    )
    args = PARAMS, jax.eval_shape(init, PARAMS), jax.ShapeDtypeStruct((8, 64), jnp.float32)
    program = jax.jit(step).lower(*args).compile()
    bias = PARAMS["bias"]
    jaxcomp.assert_no_dense(program, mesh, "replica", exact={"bias": bias, "statistic": bias})
    with pytest.raises(AssertionError, match="here 16 elements are named"):
        jaxcomp.assert_no_dense(program, mesh, "replica", exact=bias)
    with pytest.raises(AssertionError, match=r"all-reduce of .*f32\[16\]"):
        jaxcomp.assert_no_dense(program, mesh, "replica")


hlo = functools.partial(program, p="f32[64]{0}", u="u32[1,64]{1,0}")
WRONG = {
    "groups that fit no axis": (
        "ROOT %r = f32[64]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add",
        r"over \?: a replica sends 256 bytes",
    ),
    "a gather of what is sharded": (
        "ROOT %g = f32[256]{0} all-gather(%p), replica_groups={}, dimensions={0}",
        r"XLA moves arrays .* sharded over 'replica'",
    ),
    "a sum of words": (
        "%w = u32[1,64]{1,0} all-reduce(%u), replica_groups={}, to_apply=%add\n"
        "  ROOT %q = f32[64]{0} copy(%p)",
        "all-reduce of u32.1,64.",
    ),
    "a part that nobody named": (
        "ROOT %r = f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%add, "
        'metadata={op_name="jit(step)/jaxcomp.variance/psum"}',
        "from jit.step./jaxcomp.variance/psum\nPart 'variance' .* write parts={'variance': params}",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_programs_of_other_versions_and_compilers_are_read(name):
    body, said = WRONG[name]
    with pytest.raises(AssertionError, match=said):
        jaxcomp.assert_no_dense(
            hlo(body), mesh_of(4), "replica", exact=jnp.zeros(200 if "gather" in name else 59)
        )


def test_a_loop_of_unknown_length_is_told():
    with pytest.raises(AssertionError, match="in a loop of unknown length"):
        jaxcomp.assert_no_dense(loop(step=0), mesh_of(4), "replica")


def test_messages_flags_and_what_is_named_pass():
    words = "%g = u32[4,64]{1,0} all-gather(%u), replica_groups={}, dimensions={0}\n  "
    reduce = "all-reduce(%p), replica_groups={}, to_apply=%add"
    part = 'metadata={op_name="jit(step)/jaxcomp.variance/psum"}'
    mesh, some = mesh_of(4), np.zeros((6, 10))
    # Of 64 elements 4, as many as there are replicas, are free.
    jaxcomp.assert_no_dense(
        hlo(f"{words}ROOT %r = f32[64]{{0}} {reduce}"), mesh, "replica", exact=some
    )
    text = hlo(f"{words}ROOT %r = f32[64]{{0}} {reduce}, {part}")
    jaxcomp.assert_no_dense(text, mesh, "replica", parts={"variance": some})
    with pytest.raises(AssertionError, match="'variance'"):
        jaxcomp.assert_no_dense(text, mesh, "replica", exact=some)
    small = hlo(f"{words}ROOT %r = f32[64]{{0}} {reduce}").replace("f32[64]", "f32[4]")
    jaxcomp.assert_no_dense([small, small], mesh, "replica")
