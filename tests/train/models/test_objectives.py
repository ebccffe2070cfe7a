"""What is asked of a text: the next byte, or hidden ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.tiny_runs import tiny_config
from train import loop
from train.config import Data, Optimizer
from train.config import run as configs
from train.models.decoder import DecoderConfig
from train.models.modules import PathRngs
from train.models.objectives import MASK, OBJECTIVES

MASKED = OBJECTIVES["masked"]
SMALL = DecoderConfig(layers=1, width=32, heads=2, context=40, vocab=257)


def made(rows=50, context=40, seed=3):
    tokens = np.random.default_rng(0).integers(0, 256, (rows, context + 1), dtype=np.int32)
    return tokens, MASKED.prepare(tokens, [[seed, row] for row in range(rows)])


def test_a_share_of_each_row_is_asked_for_and_most_of_it_hidden():
    tokens, batch = made(400)
    inputs, targets = batch[:, 0], batch[:, 1]
    asked = targets >= 0
    assert asked.sum(axis=1).tolist() == [6] * 400  # 15% of 40
    np.testing.assert_array_equal(targets[asked], tokens[:, :-1][asked])
    np.testing.assert_array_equal(inputs[~asked], tokens[:, :-1][~asked])
    hidden = np.mean(inputs[asked] == MASK)
    kept = np.mean(inputs[asked] == targets[asked])
    # 2,400 positions: three standard deviations.
    assert abs(hidden - 0.8) < 0.025 and abs(kept - 0.1) < 0.02


def test_masks_are_a_function_of_the_row_alone():
    tokens, batch = made()
    part = MASKED.prepare(tokens[7:9], [[3, 7], [3, 8]])
    np.testing.assert_array_equal(part, batch[7:9])
    assert np.any(made(seed=4)[1][:, 1] != batch[:, 1])


def test_the_loss_is_that_of_the_hidden_bytes():
    _, batch = made()
    right = lambda inputs: 30.0 * jax.nn.one_hot(jnp.maximum(batch[:, 1], 0), 257)
    loss = lambda logits_of: float(MASKED.measure(logits_of, jnp.asarray(batch))["loss"])
    assert loss(right) < 1e-6
    wrong = lambda inputs: 30.0 * jax.nn.one_hot(inputs, 257)
    assert 20 < loss(wrong) < 30
    uniform = lambda inputs: jnp.zeros((*inputs.shape, 257))
    assert loss(uniform) == pytest.approx(np.log(257))


@pytest.mark.parametrize("name", ["next_token", "masked"])
def test_only_the_causal_model_does_not_look_ahead(name):
    model = OBJECTIVES[name].models[DecoderConfig](SMALL, rngs=PathRngs(0))
    tokens = jnp.zeros((1, 40), jnp.int32)
    logits = lambda tokens: model(tokens)[0, 0]
    changed = np.any(np.asarray(logits(tokens)) != np.asarray(logits(tokens.at[0, -1].set(9))))
    assert changed == (name == "masked")


def test_a_masked_model_learns(tmp_path, undrawn):
    text = tmp_path / "text.txt"
    text.write_text("the same words again and again. " * 500)
    optimizer = Optimizer("zero_one_adam(learning_rate, axis_name)", 1e-2, warmup_steps=4)
    run = {"objective": "masked", "model": SMALL, "data": Data(path=str(text), batch=8)}
    run |= {"optimizer": optimizer, "steps": 40, "eval_every": 20, "eval_batches": 2}
    rows = loop.run(tiny_config(tmp_path, **run))
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert losses[-1] < 0.6 * losses[0]


def test_the_model_needs_a_token_for_what_is_hidden():
    config = configs.load("configs/nano_bert_dense.py")
    with pytest.raises(ValueError, match=r"model.vocab=256 must be at least 257"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=256))
