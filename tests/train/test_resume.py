"""A run goes on where a checkpoint was made, with what replicas had for themselves."""

import contextlib
import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.launch import claims
from tests.helpers.replicas import state_of
from tests.helpers.tiny_runs import tiny_config, trained
from train import loop, resume
from train import task as tasks
from train.checkpoints import emergency
from train.checkpoints.store import open_checkpoints
from train.config import Images
from train.config.facts import to_json
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig
from train.models.swin import SwinConfig
from train.models.vit import ViTConfig
from train.placement import build


@pytest.fixture(scope="module")
def task_of(tmp_path_factory):
    """Makes the tasks of a tiny run on so many replicas, each compiled once."""
    folder, update = (
        tmp_path_factory.mktemp("runs"),
        "chain(compressed_mean(sign(), axis_name), {})",
    )
    of = {"steps": 6, "model": DecoderConfig(layers=1, width=32, heads=2, context=16)}
    return functools.cache(
        lambda replicas: tasks.make_task(
            tiny_config(folder, update.format("sgd(0.1)"), replicas=replicas, **of)
        )
    )


def test_the_policy_says_what_residuals_other_replicas_begin_with(task_of, tmp_path, capsys):
    task, other = task_of(4), task_of(2)
    params, state = trained(task, 2)
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
        jax.tree.map(np.testing.assert_array_equal, got_params, params)
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
    params, state = trained(task, 1)
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


def test_what_was_set_otherwise_in_the_run_that_gives_parameters_is_told(task_of, tmp_path, capsys):
    task = task_of(2)
    checkpoints = open_checkpoints(tmp_path / "checkpoints")
    saved = resume.metadata(task, resume.Progress(step=1))
    checkpoints.save(1, {"params": task.init()[0]}, saved)
    checkpoints.close()
    task = task._replace(init=lambda params: (params, None))
    told = f"run: from step 0 on with the parameters of {tmp_path}, which had other settings: "
    model = dataclasses.replace(task.config.model, heads=4)
    changes = {"start_from": str(tmp_path), "model": model, "seed": 1}
    changed = task._replace(config=dataclasses.replace(task.config, **changes))
    resume.begin(changed, tmp_path / "new")
    assert capsys.readouterr().err == f"{told}model.heads 2 -> 4\n"


SMALL_MODELS = [
    ViTConfig(layers=1, width=8, heads=2, classes=3),
    SwinConfig(blocks=(1,), width=8, heads=2, size=8, classes=3),
    ResNetConfig(blocks=(1,), width=8, stem="plain", size=8, classes=3),
]


@pytest.mark.parametrize("few", SMALL_MODELS, ids=lambda model: type(model).__name__)
def test_a_run_with_other_classes_has_a_new_head(few, tmp_path, capsys):
    config = tiny_config(tmp_path, objective="classify", model=few, data=Images(batch=8))
    mesh, here = (
        jax.make_mesh((1,), ("replica",)),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    as_task = lambda config: SimpleNamespace(
        config=config,
        mesh=mesh,
        natural=build.param_shapes(config),
        places=jax.tree.map(lambda _: here, build.param_shapes(config)),
        init=lambda params: (params, None),
    )
    old = jax.tree.map(lambda x: x + 1, build.random_params(config))
    with contextlib.closing(open_checkpoints(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(1, {"params": old}, {"config": json.loads(to_json(config))})
    more = dataclasses.replace(few, classes=5)
    begun = dataclasses.replace(config, model=more, seed=1, start_from=str(tmp_path))
    params = resume.begin(as_task(begun), tmp_path / "new")[0]
    drawn = jax.jit(lambda: build.random_params(begun))()
    jax.tree.map(np.testing.assert_array_equal, params, old | {"head": drawn["head"]})
    assert f"with a new head for 5 classes: {tmp_path} has 3\n" in capsys.readouterr().err
    wide = dataclasses.replace(more, width=2 * few.width)
    with pytest.raises(ValueError, match="is of another model"):
        resume.begin(as_task(dataclasses.replace(begun, model=wide)), tmp_path / "new")


def test_rows_stay_where_checkpoints_are_on_a_disk_that_is_not_there(
    task_of, tmp_path, monkeypatch
):
    task = task_of(2)
    config = dataclasses.replace(task.config, runs_dir=str(tmp_path))
    monkeypatch.setattr(loop, "make_task", lambda config: task._replace(config=config))
    (folder := tmp_path / config.name).mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 3}\n')
    (folder / "checkpoints").symlink_to(tmp_path / "disk")
    with pytest.raises(OSError, match="cannot write checkpoints to"):
        loop.run(config)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 3}\n'
