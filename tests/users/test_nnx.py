"""An image classifier of Flax nnx, with BatchNorm and dropout, as one writes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomp
import jaxcomp.flax
from jaxcomp import report
from tests.helpers.replicas import one_value
from tests.helpers.user_methods import KINDS, PATIENCE, USER_METHODS

REPLICAS, BATCH, CLASSES = 2, 32, 4
MEAN = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
EXACT_SGD = optax.chain(MEAN, optax.sgd(0.1))


def mesh_of_replicas():
    return jax.make_mesh((REPLICAS,), ("replica",))


def optimizer_of(model, tx=EXACT_SGD, wrt=nnx.Param):
    return nnx.Optimizer(model, jaxcomp.flax.on_mesh(tx, mesh_of_replicas(), "replica"), wrt=wrt)


class Classifier(nnx.Module):
    def __init__(self, rngs, rate=0.5):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(8 * 16, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits.argmax(-1) == batch["label"]


def batch_of(step):
    """Bars of a class's own row in noise."""
    rng = np.random.default_rng(step)
    label = rng.integers(CLASSES, size=BATCH)
    image = rng.normal(size=(BATCH, 8, 8, 1)).astype(np.float32) / 2
    image[np.arange(BATCH), 2 * label] += 1
    return {"image": image, "label": label}


def trained(tx, steps=40, **options):
    """A model, its optimizer and the metrics of each step, on replicas."""
    model = Classifier(nnx.Rngs(0), **options)
    optimizer, step = optimizer_of(model, tx), jaxcomp.flax.train_step(loss_fn, has_aux=True)
    history = [step(model, optimizer, batch_of(i)) for i in range(steps)]
    return model, optimizer, step, history


@functools.cache
def dense(steps=40, rate=0.5):
    """The same by plain nnx, on one device."""
    model = Classifier(nnx.Rngs(0), rate)
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch_of(i))) for i in range(steps)]
    return model, losses


def leaves(model):
    return jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param)))


def accuracy(model):
    """Of batches that nobody trained on, by the running averages."""
    model.eval()
    right = [jax.jit(loss_fn)(model, batch_of(1000 + i))[1] for i in range(4)]
    model.train()
    return float(np.mean(right))


@pytest.mark.parametrize("method", KINDS)
def test_it_classifies_as_after_dense_training(method):
    model, optimizer, step, history = trained(
        USER_METHODS[method](5e-3), steps=40 * PATIENCE.get(method, 1)
    )
    losses = [float(metrics["loss"].mean()) for metrics in history]
    assert np.mean(losses[-8:]) < 0.3 * losses[0]
    assert accuracy(model) > accuracy(dense()[0]) - 0.05 > 0.85
    assert int(optimizer.step[...]) == len(history)
    for x in leaves(model):
        one_value(x)


def test_batch_norm_and_microbatches_are_those_of_the_whole_batch():
    model, optimizer, step, [metrics] = trained(EXACT_SGD, steps=1, rate=0.0)
    whole, _ = dense(steps=1, rate=0.0)
    # The mean of means is the batch's; the variances are about means of their own.
    got, want = (nnx.as_pure(m.norm.mean[...]) for m in (model, whole))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    assert metrics["aux"].shape == (REPLICAS, BATCH // REPLICAS)

    args, weights = (model, optimizer, batch_of(1)), sum(x.size for x in leaves(model))
    rows = report.collectives(step.lower(*args).compile(), optimizer.tx.init.update.mesh)
    assert sum(row.operand_bytes for row in rows) == 4 * (weights + 16)


class Noise(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros(()))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.weight * x.mean(), self.dropout(jnp.ones(64))


def test_dropout_differs_by_replica_microbatch_and_step_and_goes_on_where_it_stopped():
    step = jaxcomp.flax.train_step(lambda model, x: model(x), has_aux=True, accumulate=2)
    tx = jaxcomp.flax.on_mesh(EXACT_SGD, mesh_of_replicas(), "replica")

    def masks(model, steps):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        batch = np.ones(2 * REPLICAS, np.float32)
        return [np.asarray(step(model, optimizer, batch)["aux"]) for _ in range(steps)]

    model = Noise(nnx.Rngs(0))
    first = masks(model, 2)
    saved = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))
    rows = np.concatenate(first)
    assert len(np.unique(rows, axis=0)) == len(rows) == 2 * 2 * REPLICAS
    after = masks(model, 1)
    restored = Noise(nnx.Rngs(0))
    nnx.update(restored, saved)
    np.testing.assert_array_equal(after, masks(restored, 1))


class Scanned(nnx.Module):
    """As MaxText's: layers in one array, with keys in one array, and a list without a hash."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros(()))
        self.activations = ["silu", "linear"]
        made = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(made)(rngs)

    def __call__(self, x):
        masks = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, jnp.ones(64))
        return self.weight * x.mean(), masks


def test_layers_that_are_scanned_draw_by_replica_and_are_traced_once():
    traced, masks, counts = [], [], []
    step = jaxcomp.flax.train_step(lambda model, x: traced.append(1) or model(x), has_aux=True)
    model = Scanned(nnx.Rngs(0))
    optimizer = optimizer_of(model)
    for _ in range(2):
        metrics = step(model, optimizer, np.ones(REPLICAS, np.float32))
        masks.append(np.asarray(metrics["aux"]).reshape(-1, 64))
        counts.append(len(traced))
    rows = np.concatenate(masks)
    assert len(np.unique(rows, axis=0)) == len(rows) == 2 * REPLICAS * 3
    assert counts[0] == counts[1]


def test_only_what_the_optimizer_trains_is_exchanged():
    model = nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0))
    base = np.asarray(model.kernel[...])
    optimizer = optimizer_of(model, wrt=nnx.LoRAParam)
    step = jaxcomp.flax.train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
    x = np.ones((4, 8), np.float32)
    program = step.lower(model, optimizer, x).compile()
    (row,) = report.collectives(program, mesh_of_replicas())
    assert row.operand_bytes == 4 * (2 * 8 * 2)
    metrics = step(model, optimizer, x)
    assert "model_state" not in metrics
    np.testing.assert_array_equal(model.kernel[...], base)


@pytest.mark.parametrize("wrt", [[nnx.Param], ..., "bias"], ids=["list", "all", "tag"])
def test_an_optimizer_may_train_what_any_filter_of_nnx_names(wrt):
    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(3))
            self.bias = nnx.Variable(jnp.ones(3), tag="bias")

    model = Model()
    optimizer = optimizer_of(model, optax.chain(MEAN, optax.sgd(1.0)), wrt)
    step = jaxcomp.flax.train_step(
        lambda model, x: jnp.mean(x) * jnp.sum(model.kernel[...] * model.bias[...])
    )
    step(model, optimizer, np.ones(REPLICAS, np.float32))
    assert model.kernel[0] == (1.0 if wrt == "bias" else 0.0)
    assert model.bias[0] == (1.0 if wrt == [nnx.Param] else 0.0)


def test_local_parameters_are_found_in_the_optimizers_state():
    _, optimizer, _, _ = trained(USER_METHODS["cocktail_sgd"](5e-3), steps=2)
    model = Classifier(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    mesh = optimizer.tx.init.update.mesh

    def spread(params, opt_state):
        local = jaxcomp.local_params(params, opt_state, "replica")
        return jax.tree.map(lambda x: x[None], nnx.as_pure(local))

    specs = jax.tree.map(
        lambda x: jax.P("replica") if x.sharding.spec[:1] == ("replica",) else jax.P(),
        nnx.as_pure(optimizer.opt_state),
    )
    rows = jax.shard_map(spread, mesh=mesh, in_specs=(jax.P(), specs), out_specs=jax.P("replica"))(
        params, nnx.as_pure(optimizer.opt_state)
    )
    kernel = np.asarray(rows["head"]["kernel"])
    assert np.abs(kernel[0] - kernel[1]).max() > 0


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(8, 16, rngs=rngs))
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.head(self.rnn(images[..., 0])[:, -1])


def test_a_recurrent_model_trains_as_on_one_device():
    """Its first carry is zeros, on all replicas."""
    found, expected = Recurrent(nnx.Rngs(0)), Recurrent(nnx.Rngs(0))
    optimizer = optimizer_of(found, optax.chain(MEAN, optax.sgd(0.5)))
    alone = nnx.Optimizer(expected, optax.sgd(0.5), wrt=nnx.Param)
    step = jaxcomp.flax.train_step(loss_fn, has_aux=True)
    for number in range(3):
        step(found, optimizer, batch_of(number))
        _, grads = nnx.value_and_grad(loss_fn, has_aux=True)(expected, batch_of(number))
        alone.update(expected, grads)
    for new, old in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5)


def test_what_flax_would_do_by_itself_is_refused():
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    step = jaxcomp.flax.train_step(loss_fn)
    with pytest.raises(ValueError, match=r"bound to no mesh; write .*on_mesh\(tx, mesh"):
        step(model, optimizer, batch_of(0))
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match=r"write step = jaxcomp.flax.train_step\(loss_fn\)"):
        optimizer.update(model, nnx.state(model, nnx.Param))


def test_random_streams_of_a_loss_are_the_model_s_own():
    model = Noise(None)
    optimizer = optimizer_of(model)

    def masks(draws, batch, **specs):
        noise = lambda model, batch: (model.weight * batch[0].mean(), draws(model, batch))
        step = jaxcomp.flax.train_step(noise, has_aux=True, **specs)
        return [np.asarray(step(model, optimizer, batch)["aux"]) for _ in range(2)]

    ones, specs = np.ones(REPLICAS, np.float32), (P("replica"), P())
    for streams in (nnx.Rngs(0), nnx.Rngs(0).dropout):
        drawn = lambda model, batch: model.dropout(jnp.ones(64), rngs=batch[1])
        with pytest.raises(ValueError, match="write model.rngs = rngs once"):
            masks(drawn, (ones, streams), batch_specs=specs)
    model.rngs = nnx.Rngs(0)
    teacher = Noise(nnx.Rngs(1))  # a batch may hold a model, with its streams
    own = lambda model, batch: model.dropout(jnp.ones(64), rngs=model.rngs)
    rows = np.concatenate(masks(own, (ones, teacher), batch_specs=specs))
    assert len(np.unique(rows, axis=0)) == len(rows) == 2 * REPLICAS


class Penalized(nnx.Module):
    """Its call leaves a penalty in the model, as nnx.Module.sow does."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        self.penalty = nnx.Intermediate(jnp.mean(y**2))
        return y


def test_a_loss_pops_what_its_model_adds():
    def popping(model, x):
        y = model(x)
        return jnp.mean((y - 1) ** 2) + sum(jax.tree.leaves(nnx.pop(model, nnx.Intermediate)))

    x = np.ones((4, 8), np.float32)
    model = Penalized(nnx.Rngs(0))
    optimizer = optimizer_of(model)
    leaving = jaxcomp.flax.train_step(lambda model, x: jnp.mean(model(x)))
    with pytest.raises(ValueError, match=r"adds the variables \['penalty'\] .* nnx.pop\(model"):
        leaving(model, optimizer, x)
    step = jaxcomp.flax.train_step(popping)
    losses = [float(step(model, optimizer, x)["loss"].mean()) for _ in range(3)]
    assert losses[2] < losses[0]
    model(x)
    with pytest.raises(ValueError, match=r"removes \['penalty'\].* before the step"):
        step(model, optimizer, x)
    nnx.pop(model, nnx.Intermediate)
    step(model, optimizer, x)
