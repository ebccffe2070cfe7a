"""A run goes on where a checkpoint was made, with what replicas had for themselves."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomp
from jaxcomp.launch import claims
from jaxcomp.replicas.resize import reset_residuals
from jaxcomp.replicas.types import to_varying
from tests.helpers.replicas import everywhere, mesh_of, rows, state_of
from train import resume
from train import task as tasks
from train.checkpoints import emergency
from train.checkpoints.store import open_checkpoints
from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


@jaxcomp.MethodState.register
class LocalSGDState(NamedTuple):
    count: Any
    drift: Any


def local_sgd(rate, every):
    """SGD on each replica alone; every so many steps all go to the mean."""

    def init(params):
        drift = to_varying(jax.tree.map(jnp.zeros_like, params), "replica")
        return LocalSGDState(jnp.zeros([], jnp.int32), drift)

    def update(grads, state, params=None):
        drift = jax.tree.map(lambda d, g: d - rate * g, state.drift, grads)
        due = (state.count + 1) % every == 0
        mean = lax.cond(
            due,
            lambda d: lax.pmean(d, "replica"),
            lambda d: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), d),
            drift,
        )
        drift = jax.tree.map(lambda d: jnp.where(due, 0, d), drift)
        return mean, LocalSGDState(state.count + 1, drift)

    return optax.GradientTransformation(init, update)


def regression(num_replicas, steps, state=None, params=None, first=0):
    """Losses of local SGD on a noisy linear regression, and what it ends with."""
    mesh = mesh_of(num_replicas)
    truth = np.arange(16, dtype=np.float32) / 8
    loss_fn = lambda p, b: jnp.mean((b["x"] @ p["w"] - b["y"]) ** 2)
    functions = jaxcomp.train_step(loss_fn, local_sgd(0.01, every=16), mesh, "replica")
    params = everywhere(mesh, params or {"w": np.zeros(16, np.float32)})
    like = jax.eval_shape(functions.init, params)
    if state is None:
        state = functions.init(params)
    else:
        state = jaxcomp.resize(state, like)
        specs = jaxcomp.state_specs(
            jaxcomp.per_replica(local_sgd(0.01, 16), "replica"), params, mesh, "replica"
        )
        place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        state = jax.tree.map(place, state, specs)
    losses = []
    for step in range(first, first + steps):
        draw = np.random.default_rng(step)
        x = draw.standard_normal((64, 16), np.float32)
        batch = {"x": x, "y": x @ truth + draw.standard_normal(64, np.float32) / 2}
        params, state, out = functions.step(params, state, rows(mesh, batch))
        losses.append(float(np.mean(out["loss"])))
    return np.array(losses), jax.device_get(params), jax.device_get(state)


def local(params, state):
    """Each replica's own parameters."""
    return params["w"] + state.drift["w"]


@pytest.fixture(scope="module")
def interrupted():
    """Four replicas, in the middle between two exchanges."""
    return regression(4, 28)[1:]


@pytest.mark.parametrize("num_replicas", [2, 8])
def test_replicas_go_on_from_the_mean_of_where_they_were(interrupted, num_replicas):
    params, state = interrupted
    assert np.all(np.std(state.drift["w"], axis=0) > 0)
    _, same, resized = regression(num_replicas, 0, state, params, first=28)
    np.testing.assert_array_equal(same["w"], params["w"])
    assert resized.drift["w"].shape == (num_replicas, 16) and int(resized.count) == 28
    expected = np.broadcast_to(np.mean(state.drift["w"], axis=0), (num_replicas, 16))
    np.testing.assert_array_equal(resized.drift["w"], expected)


@pytest.mark.parametrize("num_replicas", [2, 8])
def test_the_loss_goes_on_without_a_step_but_not_where_the_drift_is_dropped(
    interrupted, num_replicas
):
    params, state = interrupted
    steady = regression(4, 40)[0][28:]
    noise = np.std(np.diff(steady))
    resumed = regression(num_replicas, 12, state, params, first=28)[0]
    assert np.abs(resumed - steady).max() < noise
    dropped = state._replace(drift=jax.tree.map(np.zeros_like, state.drift))
    without = regression(num_replicas, 12, dropped, params, first=28)[0]
    assert np.abs(without - steady).max() > 2 * noise


def test_only_residuals_are_reset():
    mesh = mesh_of(2)
    tx = jaxcomp.per_replica(
        optax.chain(
            jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica", exact=lambda path, leaf: False),
            optax.sgd(0.1, momentum=0.9),
            local_sgd(0.01, 16),
        ),
        "replica",
    )
    params = {"w": np.zeros(2048, np.float32)}
    specs = jaxcomp.state_specs(tx, params, mesh, "replica")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=jax.P(), out_specs=specs)
    state = jax.tree.map(lambda x: np.ones_like(x), jax.jit(init)(params))
    reset = reset_residuals(state)
    held = [state_of(reset, name) for name in ("residual", "owner_residual")]
    assert len(jax.tree.leaves(held)) == 2
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(held))
    for name in ("trace", "drift"):
        np.testing.assert_array_equal(state_of(reset, name)["w"], state_of(state, name)["w"])
    assert [int(part.count) for part in (reset[0], reset[2])] == [1, 1]


# Through checkpoints.


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    """Makes the tasks of a tiny run on so many replicas, each compiled once."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("to be or not to be that is the question " * 200)

    @functools.cache
    def make(replicas):
        return tasks.make_task(
            Config(
                name="run",
                steps=6,
                replicas=replicas,
                optimizer=Optimizer("chain(compressed_mean(sign(), axis_name), sgd(0.1))", 0.1),
                data=Data(path=str(text), batch=8),
                model=DecoderConfig(layers=1, width=32, heads=2, context=16),
            )
        )

    return make


def test_the_policy_says_what_residuals_other_replicas_begin_with(task_of, tmp_path, capsys):
    task, other = task_of(4), task_of(2)
    params, state = task.init()
    for step in range(2):
        params, state, _ = task.step(params, state, task.batch(step))
    checkpoints = open_checkpoints(tmp_path)
    done = resume.Progress(step=2, losses=[5.25])
    checkpoints.save(2, {"params": params, "state": state}, resume.metadata(task, done))
    checkpoints.close()
    residual = np.asarray(state_of(state, "residual")["block_0"]["up"]["kernel"])
    assert np.any(residual)
    for policy, expected in (
        ("keep_mean", residual.mean(0)),
        ("reset", np.zeros_like(residual[0])),
    ):
        changed = other._replace(config=dataclasses.replace(other.config, resize=policy))
        got_params, got, got_done = resume.begin(changed, tmp_path)
        assert got_done == done
        for leaf, same in zip(jax.tree.leaves(got_params), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(leaf, same)
        kept = np.asarray(state_of(got, "residual")["block_0"]["up"]["kernel"])
        # A mean of four numbers, in another order of additions.
        np.testing.assert_allclose(kept, np.stack([expected] * 2), rtol=2**-22, atol=1e-9)
        line = f"run: from step 2 on 2 replicas instead of 4, resize={policy}\n"
        assert capsys.readouterr().err == line
    optimizer = dataclasses.replace(task.config.optimizer, warmup_steps=3)
    changed = task._replace(config=dataclasses.replace(task.config, seed=5, optimizer=optimizer))
    resume.begin(changed, tmp_path)
    old = task.config
    line = (
        "run: from step 2 on with other settings: "
        f"optimizer.warmup_steps {old.optimizer.warmup_steps} -> 3; seed {old.seed} -> 5\n"
    )
    assert capsys.readouterr().err == line


def test_other_replicas_go_on_from_copies_as_from_a_checkpoint(task_of, tmp_path, capsys):
    task, other = task_of(4), task_of(2)
    local = str(tmp_path / "l"), 10, 10
    params, state = task.init()
    params, state, _ = task.step(params, state, task.batch(0))
    tree, done = {"params": params, "state": state}, resume.Progress(step=1, losses=[5.25])
    saved = open_checkpoints(tmp_path / "saved")
    saved.save(1, tree, resume.metadata(task, done))
    saved.close()
    expected = resume.begin(other, tmp_path / "saved")
    directory = tmp_path / "run" / "checkpoints"
    with contextlib.suppress(ConnectionError), claims.claimed(directory.parent) as claim:
        with emergency.opened(directory.parent, claim, *local) as copies:
            copies.begin(0, None)
            copies.keep(1, tree, emergency.record(tree, resume.metadata(task, done)))
            copies.wait()
            raise ConnectionError
    capsys.readouterr()
    with claims.claimed(directory.parent) as claim:
        with emergency.opened(directory.parent, claim, *local) as copies:
            found = resume.begin(other, directory, copies)
    assert capsys.readouterr().err == (
        "run: from step 1 on 2 replicas instead of 4, resize=keep_mean\n"
        "run: from step 1 on with emergency copies; there is no checkpoint\n"
    )
    assert found[2] == done and not directory.exists()
    for leaf, same in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_array_equal(leaf, same)
        assert leaf.sharding == same.sharding


def test_a_checkpoint_of_another_program_is_refused_by_name(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(3, {"x": jnp.ones(3)}, {"epoch": 1})
    checkpoints.close()
    task = SimpleNamespace(config=SimpleNamespace(resume=True))
    with pytest.raises(ValueError, match="/3 is not of a run of this program: its metadata lack"):
        resume.begin(task, tmp_path)
