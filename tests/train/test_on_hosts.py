"""Replicas that are hosts: parameters in shards over a host's devices train as whole ones."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.helpers.tiny_runs import tiny_config
from train import loop
from train import task as tasks
from train.data.sources import Images
from train.models.decoder import DecoderConfig
from train.models.vit import ViTConfig
from train.placement.resolve import resolve

pytestmark = pytest.mark.usefixtures("undrawn")

MODEL = DecoderConfig(layers=2, width=16, heads=2, context=16, scan=True, remat=True)
UPDATE = "chain(compressed_mean(identity(), axis_name), adam(learning_rate))"


@pytest.fixture
def config(tmp_path):
    on_hosts = {"replicas": 4, "fast": 2, "in_shards": True, "per_layer": False, "model": MODEL}
    return tiny_config(tmp_path, UPDATE, schedule="constant", steps=3, checksum_every=2, **on_hosts)


def test_two_hosts_of_two_devices_train_as_two_replicas(config, monkeypatch):
    task = tasks.make_task(config)
    kernel = task.like["params"]["blocks"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 8, 64)
    moments = [x for x in jax.tree.leaves(task.like["state"]) if x.shape[-3:] == kernel.shape]
    assert moments
    for moment in moments:
        assert moment.sharding.shard_shape(moment.shape)[-3:] == (2, 8, 64)
    # Each device's perceptrons see its own 2 sequences of 16 tokens, not the host's 4.
    program = task.step.as_text()
    assert "f32[32,64]" in program and "f32[64,64]" not in program
    monkeypatch.setattr(loop, "make_task", lambda config: task._replace(config=config))
    rows = loop.run(config)
    whole = dataclasses.replace(config, name="whole", replicas=2, fast=1, in_shards=False)
    other = tasks.make_task(whole)
    monkeypatch.setattr(loop, "make_task", lambda config: other)
    expected = loop.run(whole)
    for name in "loss", "val_loss":
        found, wanted = (
            [r[name] for r in rs if r.get(name) is not None] for rs in (rows, expected)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert task.sent_bytes <= 0.6 * other.sent_bytes  # each device sends what its shards are
    # A finished run is read again, onto the same shards.
    monkeypatch.setattr(loop, "make_task", lambda config: task._replace(config=config))
    again = loop.run(dataclasses.replace(config, steps=4))
    assert again[-1]["step"] == 4 and again[-1]["val_loss"] < rows[0]["val_loss"]
    with pytest.raises(ValueError, match="trained with in_shards=True.* write --in-shards;"):
        loop.run(dataclasses.replace(config, steps=5, in_shards=False))


def test_what_cannot_be_in_shards_is_refused(config):
    with pytest.raises(ValueError, match="in_shards=True needs several devices .*Write --fast 8"):
        dataclasses.replace(config, fast=1)
    images = dataclasses.replace(config, objective="classify", model=ViTConfig(), data=Images())
    with pytest.raises(ValueError, match="in_shards=True needs model=DecoderConfig"):
        resolve(images)
