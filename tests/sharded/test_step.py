"""A whole step of sharded parameters against training on one device, plain and in Flax."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.replicas.resize import resize
from tests.helpers.layered import (
    EXACT,
    HIDDEN,
    ROUNDING,
    WIDTH,
    assert_close,
    loss_of,
    make_batch,
    make_params,
    on,
    plain_training,
    start,
    train,
)
from tests.helpers.replicas import everywhere, mesh_of, rows

FAST, KEPT, ONCE = {"fast_axis": "fast"}, {"secondary": True}, {"gather_once": True}


@pytest.mark.parametrize(
    ("sizes", "options", "accumulate"),
    [
        ((1,), {}, 1),
        ((3,), {}, 1),
        ((8,), {}, 1),
        ((3,), KEPT, 1),
        ((2, 3), FAST, 1),
        ((4, 2), FAST | KEPT, 1),
        ((1,), ONCE, 3),
        ((4,), ONCE, 1),
        ((2, 2), FAST | ONCE, 3),
    ],
)
def test_exact_codes_train_as_one_device_does_on_the_whole_batch(sizes, options, accumulate):
    fsdp = dataclasses.replace(EXACT, **options)
    params, _, history = train(fsdp, optax.sgd(0.5), *sizes, accumulate=accumulate)
    want, losses, _ = plain_training(optax.sgd(0.5))
    assert_close(params, want, ROUNDING)
    for metrics, loss in zip(history, losses, strict=True):
        assert metrics["loss"].shape == (np.prod(sizes),) and not metrics["skipped"]
        assert abs(metrics["loss"].mean(dtype=np.float64) - loss) < 1e-6 * loss


def train_and_move(tx, num_replicas):
    """Parameters and state after one step on so many replicas, and two more on three."""
    mesh, train_step, shards, state = start(EXACT, tx, num_replicas)
    shards, state, _ = train_step.step(shards, state, rows(mesh, make_batch(0)))
    mesh, train_step, *like = start(EXACT, tx, 3)
    shards, state = resize((shards, state), tuple(like))
    for step in (1, 2):
        shards, state, _ = train_step.step(shards, state, rows(mesh, make_batch(step)))
    return EXACT.unshard(shards, mesh), EXACT.unshard(state.inner, mesh)


def test_parameters_that_an_optimizer_leaves_out_stay_so_in_whole_and_in_resized_states():
    matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    tx = optax.masked(optax.adam(1e-2, eps=1e-3), matrices)
    params, state = train_and_move(tx, 2)
    want, _, want_state = plain_training(tx)
    assert_close(params, want, 1e-6)
    assert_close(state, want_state, 1e-6)


@pytest.mark.parametrize("names", [("replica",), ("fast", "replica")], ids=str)
def test_an_optimizer_of_shards_is_the_optimizer_and_clips_by_the_whole_norm(names):
    # A norm of at most 0.1 is always reached; without momentum Adam's first steps are signs.
    clip, adam = 0.1, optax.adam(1e-2, eps=1e-3)
    tx = optax.chain(jaxcomp.clip_by_global_norm(clip), adam)
    fsdp = dataclasses.replace(EXACT, fast_axis="fast") if "fast" in names else EXACT
    mesh = jax.sharding.Mesh(mesh_of(*[2] * len(names)).devices, names)
    made = jaxcomp.qsdp_train_step(loss_of(fsdp), tx, mesh, fsdp, accumulate=3)
    shards = fsdp.shard(everywhere(mesh, make_params()), mesh)
    state = made.init(shards)
    for number in range(3):
        shards, state, _ = made.step(shards, state, on(mesh, make_batch(number)))
    want, _, want_state = plain_training(optax.chain(optax.clip_by_global_norm(clip), adam))
    assert_close(fsdp.unshard(shards, mesh), want, 1e-6)
    assert state.count == 3
    for moment in jax.tree.leaves(optax.tree_utils.tree_get(state, "mu")):
        assert moment.sharding.spec == P(fsdp.axes)
    whole = fsdp.unshard(state.inner, mesh)
    assert_close(jax.tree.leaves(whole), jax.tree.leaves(want_state), 1e-7)


def test_all_replicas_skip_a_step_that_is_not_finite_together():
    mesh, train_step, shards, state = start(EXACT, optax.adam(1e-2), 3)
    batch = make_batch()
    batch["y"][-1, 0] = np.inf  # of the last replica only
    before = jax.tree.map(np.asarray, (shards, state))
    shards, state, metrics = train_step.step(shards, state, rows(mesh, batch))
    assert metrics["skipped"]
    assert state.count == 1
    jax.tree.map(np.testing.assert_array_equal, shards, before[0])
    jax.tree.map(np.testing.assert_array_equal, state.inner, before[1].inner)


def test_quantized_training_follows_exact_training_and_goes_on_with_other_shards():
    # Eight bits of a range of about 2: steps of 1/128 in the weights.
    fsdp = jaxcomp.qsdp("replica", exact=lambda path, leaf: leaf.ndim < 2)
    tx = optax.sgd(0.1, momentum=0.5)
    params, _, history = train(fsdp, tx, 4)
    want, losses, _ = plain_training(tx)
    assert_close(params, want, 0.02)
    assert np.abs([m["loss"].mean() for m in history] - np.array(losses)).max() < 0.02
    assert_close(train_and_move(tx, 4)[0], want, ROUNDING)


def test_a_step_sends_messages_and_one_number():
    num_replicas = 4
    fsdp = jaxcomp.qsdp("replica", exact=lambda *_: False)
    mesh, train_step, shards, state = start(fsdp, optax.adam(1e-3), num_replicas)
    compiled = train_step.step.lower(shards, state, rows(mesh, make_batch())).compile()
    found = report.collectives(compiled, mesh)
    assert {m.shape.split("[")[0] for m in found if m.op != "all-reduce"} == {"u8"}
    ops = sorted(m.op for m in found)
    assert ops == ["all-gather"] * 5 + ["all-reduce"] + ["all-to-all"] * 3
    [number] = [m for m in found if m.op == "all-reduce"]
    assert number.operand_bytes == 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        hidden = jnp.tanh(nn.Dense(HIDDEN, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Dense(WIDTH, name="down")(hidden), None


class Model(nn.Module):
    layer: type = Block
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(self.layer, length=3, **axes)(name="blocks")(x, None)[0]
        for index in range(2):
            x, _ = self.layer(name=f"blocks_{index}")(x)
        return nn.Dense(WIDTH, name="last")(x)


@pytest.mark.parametrize("scan", [False, True])
def test_a_flax_model_of_layers_under_remat_and_scan_trains_as_without_shards(scan):
    plain = Model(scan=scan)
    params = plain.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    fsdp = EXACT
    model = Model(nn.remat(nn.map_variables(Block, "params", fsdp.gather)), scan)

    def plain_loss(params, batch):
        return jnp.mean((plain.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    def loss_fn(shards, batch):
        params = fsdp.gather(shards, but="blocks")
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    mesh = mesh_of(2)
    tx = optax.sgd(0.5)
    train_step = jaxcomp.qsdp_train_step(loss_fn, tx, mesh, fsdp)
    shards = fsdp.shard(everywhere(mesh, params), mesh, lambda path, leaf: scan)
    state = train_step.init(shards)
    for step in range(2):
        batch = make_batch(step)
        shards, state, metrics = train_step.step(shards, state, rows(mesh, batch))
        loss, grads = jax.jit(jax.value_and_grad(plain_loss))(params, batch)
        assert abs(metrics["loss"].mean() - loss) < 1e-5 * loss
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    assert_close(fsdp.unshard(shards, mesh), params, 4 * ROUNDING)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda mesh: {"mesh": mesh_of(2, 2)}, r"needs one of \('replica',\) and no others"),
        (lambda mesh: {"mesh": mesh, "accumulate": 0}, "accumulate is 0"),
    ],
)
def test_mistakes_are_told_at_construction(make, message):
    words = {"loss_fn": loss_of(EXACT), "tx": optax.sgd(1), "fsdp": EXACT} | make(mesh_of(2))
    with pytest.raises(ValueError, match=message):
        jaxcomp.qsdp_train_step(**words)


@pytest.mark.parametrize(
    "method",
    [
        optax.chain(
            jaxcomp.compressed_mean(jaxcomp.identity(), "replica", error_feedback=False),
            optax.sgd(1),
        ),
        jaxcomp.slamb(1e-2, "replica"),
        jaxcomp.sharded_optimizer(optax.adam(1e-3), "replica"),
    ],
    ids=["compressed_mean", "slamb", "sharded_optimizer"],
)
def test_what_would_mix_the_shards_of_replicas_is_refused(method):
    mesh = mesh_of(2)
    made = jaxcomp.qsdp_train_step(loss_of(EXACT), method, mesh, EXACT)
    with pytest.raises(ValueError, match="write the optimizer alone"):
        made.init(EXACT.shard({"kernel": np.ones((4, 4), np.float32)}, mesh))


def test_an_optimizer_with_inner_products_is_refused():
    mesh, lbfgs = mesh_of(2), optax.lbfgs(0.1, linesearch=None)
    made = jaxcomp.qsdp_train_step(loss_of(EXACT), lbfgs, mesh, EXACT)
    with pytest.raises(ValueError, match=r"shards over \('replica',\) as whole .*optax\.lbfgs do"):
        made.init(EXACT.shard({"kernel": np.ones((4, 4), np.float32)}, mesh))


def test_parameters_and_shards_of_other_meshes_are_told_from_shards():
    mesh, train_step, shards, state = start(EXACT, optax.sgd(1), 2)
    with pytest.raises(ValueError, match=r"float32\[16,16\].*each of the mesh's 2 dev"):
        train_step.init(make_params())
    _, _, others, _ = start(EXACT, optax.sgd(1), 4)
    with pytest.raises(ValueError, match=r"Shard.*at 'first'.*jaxcomp.resize\(shards, like\)"):
        train_step.step(jax.tree.map(np.asarray, others), state, rows(mesh, make_batch()))
