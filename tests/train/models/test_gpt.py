"""The transformer: one program for all blocks is the same model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from train.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=3, width=16, heads=2, context=8)
SCANNED = dataclasses.replace(SMALL, scan=True)


def test_scanned_blocks_are_those_of_the_loop_with_their_parameters_stacked():
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 256)
    params = GPT(SMALL).init(jax.random.key(0), tokens)["params"]
    blocks = [params[f"block_{index}"] for index in range(3)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    stacked = others | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}
    fresh = GPT(SCANNED).init(jax.random.key(0), tokens)["params"]
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert shapes(fresh) == shapes(stacked)
    kernels = np.asarray(fresh["blocks"]["up"]["kernel"])
    assert np.all(np.std(kernels - kernels[::-1], axis=(1, 2))[[0, 2]] > 0.01)  # not one for all
    # The same operations, fused otherwise: a few float32 roundings of logits of about one.
    np.testing.assert_allclose(
        GPT(SCANNED).apply({"params": stacked}, tokens),
        GPT(SMALL).apply({"params": params}, tokens),
        rtol=0,
        atol=1e-5,
    )
