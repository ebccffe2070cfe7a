"""Thin matrices: a model begins as it was, trains them alone, and takes them up."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxcomp
from jaxcomp.compressors.policies import path_of
from tests.helpers.replicas import mesh_of
from tests.helpers.tiny_runs import tiny_config, trained
from train import report, resume
from train import task as tasks
from train.checkpoints.store import open_checkpoints
from train.config import Optimizer
from train.models import lora
from train.models.decoder import Decoder, DecoderConfig
from train.models.modules import PathRngs, split
from train.placement.resolve import resolve

PLAIN = DecoderConfig(layers=2, width=16, heads=2, context=8, scan=True)
THIN = dataclasses.replace(PLAIN, lora=2, lora_alpha=6.0)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 8), np.int32)


def made(config):
    return split(Decoder(config, rngs=PathRngs(0)))


def test_a_model_begins_as_without_and_takes_up_what_it_has_learned():
    plain, params = made(PLAIN)
    apply, thin = made(THIN)
    jax.tree.map(np.testing.assert_array_equal, lora.merged(thin, THIN.lora_scale), params)
    np.testing.assert_allclose(apply(thin, TOKENS), plain(params, TOKENS), rtol=0, atol=1e-6)
    rng = np.random.default_rng(1)
    learned = jax.tree.map(lambda x: x + rng.normal(0, 0.1, x.shape), lora.only(thin))
    changed = lora.combined(lora.without(thin), learned)
    assert jax.tree.structure(changed) == jax.tree.structure(thin)
    assert len(jax.tree.leaves(learned)) == 8 and learned["embed"]["embedding"] is None
    whole = lora.merged(changed, THIN.lora_scale)
    kernel, thin_one = whole["blocks"]["up"]["kernel"], changed["blocks"]["up"]
    product = thin_one["lora_a"][1] @ thin_one["lora_b"][1]
    expected = thin_one["kernel"][1] + 3.0 * product
    np.testing.assert_allclose(kernel[1], expected, rtol=1e-6)
    np.testing.assert_allclose(apply(changed, TOKENS), plain(whole, TOKENS), rtol=0, atol=1e-5)


MEAN = "chain(compressed_mean({}, axis_name, exact=by_path(('.*', False))), sgd(learning_rate))"
DENSE = MEAN.format("identity()")


def config_of(tmp_path, update=DENSE, **changes):
    run = {"optimizer": Optimizer(update, 0.1, schedule="constant"), "batch": 4}
    return tiny_config(tmp_path, **run | {"model": THIN, "trainable": lora.TRAINED} | changes)


@pytest.mark.parametrize(
    ("trainable", "model", "code", "size"),
    [
        # An exact mean of two sends each half once, there and back: 4 bytes a parameter.
        (lora.TRAINED, THIN, "identity()", 4),
        ("(^|/)bias$", PLAIN, "identity()", 4),
        # A scale of four bytes for each 128 of 4 bits.
        (lora.TRAINED, THIN, "quantize(4)", 0.5 + 4 / 128),
    ],
)
def test_what_is_trained_is_all_that_changes_and_is_sent(trainable, model, code, size, tmp_path):
    update = MEAN.format(code)
    task = tasks.make_task(config_of(tmp_path, update, model=model, trainable=trainable))
    before, params = task.init()[0], trained(task, 2)[0]
    changed, numel = set(), 0
    for (key, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(params), strict=True
    ):
        if np.any(np.asarray(old) != np.asarray(new)):
            changed.add(jax.tree_util.keystr(key[-1:], simple=True))
        numel += old.size * bool(re.search(trainable, path_of(key)))
    assert changed == ({"lora_a", "lora_b"} if model is THIN else {"bias"})
    # No more but what tells that all are finite, and what fills up.
    assert size * numel <= task.sent_bytes <= size * numel + 64
    # A report compares that with a dense mean of the same, and names no array that is frozen.
    assert report.dense_bytes(task) == 4 * numel < 4 * tasks.num_parameters(task)
    plan = json.loads(report.record(task))["plan"]
    assert plan["trained"] == numel and all(re.search(trainable, path) for path in plan["exact"])
    assert f" parameters, {numel:,} of them trained, on 2 replicas" in report.text(task)


def test_a_run_without_lora_is_exported_before_some_is_added(tmp_path):
    thin = config_of(tmp_path, start_from=str(tmp_path / "my run"))
    natural = jax.tree.map(np.asarray, made(PLAIN)[1])
    checkpoints = open_checkpoints(tmp_path / "my run" / "checkpoints")
    checkpoints.save(1, {"params": natural}, {})
    checkpoints.close()
    task = SimpleNamespace(config=thin, natural=jax.eval_shape(lambda: made(THIN)[1]))
    export = f"write python -m train.export '{tmp_path / 'my run'}' FOLDER, and --start-from FOLDER"
    with pytest.raises(ValueError, match=f"model.lora=2 .* is a run without LoRA; {export}"):
        resume.begin(task, tmp_path / "new")


def test_what_cannot_be_trained_so_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.lora=2 .*; write --trainable 'lora_\[ab\]\$'"):
        config_of(tmp_path, trainable=None)
    nothing = config_of(tmp_path, trainable="lora_c")
    with pytest.raises(ValueError, match="trainable='lora_c' matches no parameter's path"):
        tasks.make_task(nothing)
    with pytest.raises(ValueError, match=r"trainable='lora_\(a' is no regular expression: missing"):
        config_of(tmp_path, trainable="lora_(a")
    sharded = config_of(tmp_path, qsdp="qsdp(axis_name)")
    with pytest.raises(ValueError, match="excludes qsdp="):
        tasks.make_task(sharded)


def test_a_pattern_of_all_parameters_leaves_none_frozen(tmp_path):
    update = DENSE.replace("identity()", "quantize(4)")
    natural = jax.eval_shape(lambda: made(PLAIN)[1])
    every, none = (
        resolve(config_of(tmp_path, update, model=PLAIN, trainable=trainable)).tx
        for trainable in (".", None)
    )
    state_of = lambda tx: jaxcomp.state_shapes(tx, natural, 2, mesh_of(2), "replica")
    assert state_of(every) == state_of(none)
