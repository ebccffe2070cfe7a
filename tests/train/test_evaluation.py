"""What a run evaluates, and that it does not depend on how rows come in batches."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.replicas import protocol
from tests.helpers.replicas import mesh_of, one_value
from tests.helpers.restoring import restore
from tests.helpers.tiny_runs import EXACT_SGD, tiny_config, trained
from train import loop
from train.checkpoints import mean, store
from train.config import Data, Images
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig
from train.placement import build, sharded
from train.task import make_task

pytestmark = pytest.mark.usefixtures("undrawn")

TINY = DecoderConfig(layers=1, width=16, heads=2, context=32, vocab=257)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Documents of different lengths, and the same as one text."""
    folder = tmp_path_factory.mktemp("texts")
    long = "the quick brown fox " * 5
    rows = [f"{n} {long}"[: 40 if n % 2 else 4] for n in range(400)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "text.txt").write_text(" ".join(rows) * 4)
    return folder


def config_of(texts, update=EXACT_SGD, **changes):
    data = Data(path=str(texts / "text.txt"), batch=8, cache=str(texts / "cache"))
    defaults = {"model": TINY, "data": data, "eval_batches": 2, "eval_every": 2}
    return tiny_config(texts, update, 3e-2, **(defaults | changes))


@pytest.mark.parametrize("kind", ["documents", "masked", "text", "images"])
def test_the_same_rows_in_other_batches_give_the_same_numbers(texts, kind):
    config = config_of(texts, replicas=1)
    if kind == "documents":
        packed = dataclasses.replace(config.data, path=str(texts / "rows.jsonl"), packed=True)
        config = dataclasses.replace(config, data=packed)
    if kind == "masked":
        config = dataclasses.replace(config, objective="masked")
    if kind == "images":
        images = {"objective": "classify", "data": Images(form="digits", batch=8)}
        model = ResNetConfig(size=8, channels=1, blocks=(1,), width=4, classes=10)
        config = dataclasses.replace(config, model=model, **images)

    def found(batch, batches):
        data = dataclasses.replace(config.data, batch=batch)
        task = make_task(dataclasses.replace(config, data=data, eval_batches=batches))
        return task.evaluate(task.init()[0])

    wanted = found(1, 12)
    assert found(3, 4) == pytest.approx(wanted, rel=1e-6)
    assert ("accuracy" in wanted) == (kind == "images")


def test_replicas_with_unlike_numbers_of_targets_count_each_target_once(texts):
    data = Data(path=str(texts / "rows.jsonl"), packed=True, batch=8, cache=str(texts / "cache"))
    found = []
    for replicas in (1, 4):
        task = make_task(config_of(texts, data=data, replicas=replicas))
        params, state = task.init()
        found.append((task.evaluate(params, state)["loss"], task))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    # So does the loss that is trained: each replica's weights are those of the whole batch.
    losses = [float(np.mean(t.step(*t.init(), t.batch(0))[2]["loss"])) for _, t in found]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def own_loss(config, params, drift, rows):
    """The mean loss of replicas at their own parameters, each on its rows."""
    loss_fn, count = build.loss_of(config), len(jax.tree.leaves(drift)[0])
    own = lambda i: jax.tree.map(lambda p, d: jnp.asarray(p + d[i]), params, drift)
    parts = [np.split(batch, count) for batch in rows]
    return np.mean([[loss_fn(own(i), part[i]) for i in range(count)] for part in parts])


@pytest.mark.parametrize(
    ("update", "own"),
    [
        ("cocktail_sgd(adam(learning_rate), axis_name, compressor=top_k(0.02))", True),
        ("diloco(adam(learning_rate), axis_name, every=3)", False),
    ],
)
def test_a_run_evaluates_replicas_on_its_way_and_their_mean_at_its_end(
    texts, update, own, monkeypatch
):
    config = config_of(texts, update, name=update.partition("(")[0])
    task = make_task(config)
    params, state = trained(task, 2)
    (drift,) = protocol.drifts(jax.device_get(state))
    assert max(np.abs(x).max() for x in jax.tree.leaves(drift)) > 1e-3
    whole = jax.device_get(params)
    rows = [task.examples.validation(number, slice(None)) for number in range(2)]
    used = drift if own else jax.tree.map(np.zeros_like, drift)
    found = task.evaluate(params, state)["loss"]
    assert found == pytest.approx(own_loss(config, whole, used, rows), rel=1e-5)
    average = jax.tree.map(lambda d: np.mean(d, axis=0, keepdims=True), drift)
    last, sent_bytes = task.deployed(params, state)
    of_mean = own_loss(config, whole, average, rows)
    assert task.evaluate(last)["loss"] == pytest.approx(of_mean, rel=1e-5)
    assert sent_bytes > 0 and abs(found / of_mean - 1) > 1e-5
    monkeypatch.setattr(loop, "make_task", lambda config: task)
    rows = loop.run(config)
    assert rows[1]["val_loss"] == pytest.approx(found, rel=1e-5)


def test_shards_are_evaluated_exported_and_begun_with_as_gathered(texts, monkeypatch):
    qsdp = "qsdp(axis_name, learned_levels(2, block=64), fast_axis=fast_axis)"
    name, model = "qsdp", dataclasses.replace(TINY, scan=True)
    two_axes = {"replicas": 4, "fast": 2, "model": model}
    config = config_of(texts, "adam(learning_rate)", qsdp=qsdp, name=name, **two_axes)
    task = make_task(config)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_task", lambda config: task)
        rows = loop.run(config)
    checkpoints = pathlib.Path(config.runs_dir, name, "checkpoints")
    saved = restore(checkpoints, task.like)[0]
    last, sent_bytes = task.deployed(saved["params"], saved["state"])
    assert sent_bytes == 0
    assert task.evaluate(last)["loss"] == rows[-1]["val_loss"]
    assert task.evaluate(saved["params"], saved["state"])["loss"] == rows[-1]["val_loss"]
    read = mean.restore_whole(store.choose(checkpoints), task.natural, mesh_of(1))
    close = lambda x, y: np.testing.assert_allclose(one_value(x), one_value(y), rtol=0, atol=1e-7)
    jax.tree.map(close, read, last)
    # Of 2 bits: far from the shards, which checkpoints keep.
    shards = sharded.qsdp_of(config).unshard(saved["params"], task.mesh)
    assert abs(task.evaluate(shards)["loss"] / rows[-1]["val_loss"] - 1) > 0.003
    of = {"model": config.model, "start_from": str(checkpoints.parent)}
    second = config_of(texts, name=f"{name} second", **of)
    assert loop.run(second)[0]["val_loss"] == pytest.approx(rows[-1]["val_loss"], rel=1e-6)
