"""The transformer: in nnx what it was in linen, and one program for all blocks is the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import linen_gpt
from train.models.gpt import GPT, GPTConfig
from train.models.modules import PathRngs, split

SIZES = {"layers": 3, "width": 16, "heads": 2, "context": 8}
SMALL = GPTConfig(**SIZES)
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 8), np.int32)


def split_gpt(config):
    return split(GPT(config, rngs=PathRngs(0)))


def value_and_grad(logits_of, params):
    return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(logits_of(params)))))(params)


def test_the_model_begins_and_computes_as_it_did_in_linen():
    linen = linen_gpt.GPT(**SIZES)
    params = linen.init(jax.random.key(0), TOKENS)["params"]
    apply, fresh = split_gpt(SMALL)
    jax.tree.map(np.testing.assert_array_equal, fresh, params)
    found = value_and_grad(lambda params: apply(params, TOKENS), params)
    expected = value_and_grad(lambda params: linen.apply({"params": params}, TOKENS), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), found, expected)


def test_scanned_blocks_are_those_of_the_loop_with_their_parameters_stacked():
    apply, params = split_gpt(SMALL)
    blocks = [params[f"block_{index}"] for index in range(3)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    stacked = others | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}
    scanned, fresh = split_gpt(dataclasses.replace(SMALL, scan=True))
    jax.tree.map(np.testing.assert_array_equal, fresh, stacked)
    # The same operations, fused otherwise: a few float32 roundings of logits of about one.
    np.testing.assert_allclose(scanned(stacked, TOKENS), apply(params, TOKENS), rtol=0, atol=1e-5)
