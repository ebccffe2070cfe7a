"""A whole step of sharded parameters against training on one device, plain and in Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from replicas import everywhere, mesh_of, rows

import jaxcomp
from jaxcomp import report
from jaxcomp.resizing import resize

EXACT = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity())
WIDTH, HIDDEN = 16, 67  # 67 and its multiples by 16 are odd for most numbers of shards


def make_params(num_layers=2):
    rng = np.random.default_rng(0)
    layers = [
        {
            "up": rng.normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 4,
            "bias": np.zeros(HIDDEN, np.float32),
            "gain": np.ones(3, np.float32),
            "down": rng.normal(size=(HIDDEN, WIDTH)).astype(np.float32) / 11,
        }
        for _ in range(num_layers)
    ]
    return {"first": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4, "layers": layers}


def make_batch(step=0, size=24):
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=(size, WIDTH)).astype(np.float32) for name in "xy"}


def block(p, x):
    hidden = jnp.tanh(x @ p["up"] + p["bias"][None])
    return x + jnp.sum(p["gain"]) / 3 * (hidden @ p["down"])


def loss_of(fsdp):
    """The loss of one device, or of shards where `fsdp` is given."""

    def loss_fn(params, batch):
        first = fsdp.gather(params["first"]) if fsdp else params["first"]
        x = batch["x"] @ first
        for p in params["layers"]:
            x = (fsdp.layer(block) if fsdp else block)(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss_fn


def start(fsdp, tx, num_replicas, **options):
    mesh = mesh_of(num_replicas)
    train_step = jaxcomp.qsdp_train_step(loss_of(fsdp), tx, mesh, fsdp, **options)
    shards = fsdp.shard(everywhere(mesh, make_params()), mesh)
    return mesh, train_step, shards, train_step.init(shards)


def train(fsdp, tx, num_replicas, num_steps=3, **options):
    mesh, train_step, shards, state = start(fsdp, tx, num_replicas, **options)
    history = []
    for step in range(num_steps):
        shards, state, metrics = train_step.step(shards, state, rows(mesh, make_batch(step)))
        history.append(jax.tree.map(np.asarray, metrics))
    assert train_step.step._cache_size() == 1
    return fsdp.unshard(shards, mesh), state, history


def plain_training(tx, num_steps=3):
    """The same on one device, on the whole batch: parameters, losses and state."""
    params = make_params()
    state, losses = tx.init(params), []

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of(None))(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(num_steps):
        params, state, loss = step(params, state, make_batch(i))
        losses.append(float(loss))
    return params, losses, state


def assert_close(got, want, atol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


# Sums of gradients in another order, then three steps of rate 1/2: values up to 2.
ROUNDING = 3 * 16 * 2.0**-24 * 2


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_exact_codes_train_as_one_device_does_on_the_whole_batch(num_replicas):
    params, _, history = train(EXACT, optax.sgd(0.5), num_replicas)
    want, losses, _ = plain_training(optax.sgd(0.5))
    assert_close(params, want, ROUNDING)
    for metrics, loss in zip(history, losses, strict=True):
        assert metrics["loss"].shape == (num_replicas,) and not metrics["skipped"]
        assert abs(metrics["loss"].mean(dtype=np.float64) - loss) < 1e-6 * loss


def test_an_optimizer_of_shards_is_the_optimizer_and_clips_by_the_whole_norm():
    # A norm of at most 0.1 is always reached; without momentum Adam's first steps are signs.
    clip, adam = 0.1, optax.adam(1e-2, eps=1e-3)
    tx = optax.chain(jaxcomp.clip_by_global_norm(clip), adam)
    params, state, _ = train(EXACT, tx, 2, accumulate=3)
    want, _, want_state = plain_training(optax.chain(optax.clip_by_global_norm(clip), adam))
    assert_close(params, want, 1e-6)
    assert state.count == 3
    moments = jax.tree.leaves(optax.tree_utils.tree_get(state, "mu"))
    assert {x.sharding.shard_shape(x.shape)[0] for x in moments} == {1}
    whole = EXACT.unshard(state.inner, mesh_of(2))
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

    mesh, train_step, shards, state = start(EXACT, tx, 4)
    shards, state, _ = train_step.step(shards, state, rows(mesh, make_batch(0)))
    mesh, train_step, *like = start(EXACT, tx, 3)
    shards, state = resize((shards, state), tuple(like))
    for step in (1, 2):
        shards, state, _ = train_step.step(shards, state, rows(mesh, make_batch(step)))
    assert_close(EXACT.unshard(shards, mesh), want, ROUNDING)


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
        (lambda mesh: {"mesh": mesh_of(2, 2)}, "needs one of 'replica' alone"),
        (lambda mesh: {"mesh": mesh, "accumulate": 0}, "accumulate is 0"),
    ],
)
def test_mistakes_are_told_at_construction(make, message):
    words = {"loss_fn": loss_of(EXACT), "tx": optax.sgd(1), "fsdp": EXACT} | make(mesh_of(2))
    with pytest.raises(ValueError, match=message):
        jaxcomp.qsdp_train_step(**words)
