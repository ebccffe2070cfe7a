"""The default code of 1-bit methods: what each leaf is sent with, and how fast one row arrives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.methods.one_bit import signs_by_row
from tests.helpers.coding import decoded


@pytest.mark.parametrize(
    ("path", "shape", "block"),
    [
        ("embed/embedding", (512, 96), 96),
        ("wte", (512, 8), 64),
        ("positions", (64, 4096), 1024),
        ("block_0/up/kernel", (96, 384), 1024),
        ("head/kernel", (96, 512), 1024),
        ("norm/scale", (96,), 1024),
    ],
)
def test_an_embedding_has_scales_of_its_rows(path, shape, block):
    code = signs_by_row(path, jax.ShapeDtypeStruct(shape, jnp.float32))
    dtype = "float32" if block == 1024 and "pos" not in path else "bfloat16"
    assert code.name == jaxcomp.sign(block=block, scale_dtype=dtype).name


@pytest.mark.parametrize(("path", "arrives"), [("embed", True), ("kernel", False)])
def test_a_row_that_moves_alone_arrives_at_once(path, arrives):
    x = np.zeros((64, 128), np.float32)
    x[9] = 0.5 * (-1) ** np.arange(128)
    got = np.asarray(decoded(signs_by_row(path, x), x.reshape(-1))).reshape(x.shape)
    assert np.array_equal(got, x) == arrives
    assert np.abs(got[9]).max() == (0.5 if arrives else 0.5 / 8)
