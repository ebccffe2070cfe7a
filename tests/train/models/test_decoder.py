"""The transformer: in nnx what it was in linen, and one program for all blocks is the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers import linen_gpt
from train.models import sharding
from train.models.decoder import Decoder, DecoderConfig
from train.models.modules import PathRngs, split

SIZES = {"layers": 3, "width": 16, "heads": 2, "context": 8}
SMALL = DecoderConfig(**SIZES)
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 8), np.int32)


def split_decoder(config):
    return split(Decoder(config, rngs=PathRngs(0)))


def value_and_grad(logits_of, params):
    return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(logits_of(params)))))(params)


def test_the_model_begins_and_computes_as_it_did_in_linen():
    linen = linen_gpt.GPT(**SIZES)
    params = linen.init(jax.random.key(0), TOKENS)["params"]
    apply, fresh = split_decoder(SMALL)
    jax.tree.map(np.testing.assert_array_equal, fresh, params)
    found = value_and_grad(lambda params: apply(params, TOKENS), params)
    expected = value_and_grad(lambda params: linen.apply({"params": params}, TOKENS), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), found, expected)


def test_scanned_blocks_are_those_of_the_loop_with_their_parameters_stacked():
    apply, params = split_decoder(SMALL)
    blocks = [params[f"block_{index}"] for index in range(3)]
    others = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    stacked = others | {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks)}
    scanned, fresh = split_decoder(dataclasses.replace(SMALL, scan=True))
    jax.tree.map(np.testing.assert_array_equal, fresh, stacked)
    # The same operations, fused otherwise: a few float32 roundings of logits of about one.
    np.testing.assert_allclose(scanned(stacked, TOKENS), apply(params, TOKENS), rtol=0, atol=1e-5)


def test_several_stacks_are_the_same_model():
    parted = dataclasses.replace(SMALL, layers=4, scan=True, stacks=2)
    apply, params = split_decoder(dataclasses.replace(parted, stacks=1))
    by_part, parts = split_decoder(parted)
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), parts["blocks_0"], parts["blocks_2"])
    jax.tree.map(np.testing.assert_array_equal, whole, params["blocks"])
    np.testing.assert_allclose(by_part(parts, TOKENS), apply(params, TOKENS), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="model.layers=4 must be divisible by model.stacks=3"):
        dataclasses.replace(parted, stacks=3)
    with pytest.raises(ValueError, match="model.stacks=2 needs scans; write --model.scan"):
        dataclasses.replace(parted, scan=False)


LLAMA = DecoderConfig(
    **SIZES | {"heads": 4},
    kv_heads=2,
    norm="rms",
    rotary="halves",
    activation="silu",
    gated=True,
    qk_norm=True,
    tied=False,
    scan=True,
)


def test_blocks_that_are_computed_anew_have_the_same_gradient():
    apply, params = split_decoder(LLAMA)
    again, _ = split_decoder(dataclasses.replace(LLAMA, remat=True))
    expected = value_and_grad(lambda params: apply(params, TOKENS), params)
    found = value_and_grad(lambda params: again(params, TOKENS), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda p: again(p, TOKENS).sum()))(params))
    assert "remat" in jaxpr


@pytest.mark.parametrize("rank", [0, 2])
def test_products_are_of_the_dtype_that_the_model_computes_in(rank):
    apply, params = split_decoder(dataclasses.replace(LLAMA, dtype="bfloat16", lora=rank))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    text = jax.jit(apply).lower(params, TOKENS).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    of_float32 = [line for line in products if "xf32>, tensor" in line.partition(" : ")[2]]
    assert products and all("xbf16>" in line for line in products), of_float32


def test_no_token_sees_a_later_one_nor_one_before_its_window():
    config = dataclasses.replace(LLAMA, layers=1, window=3)
    apply, params = split_decoder(config)
    changed = TOKENS.copy()
    changed[:, 4] += 1
    same = np.all(apply(params, TOKENS) == apply(params, changed % 256), axis=(0, 2))
    assert same.tolist() == [True] * 4 + [False] * 3 + [True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "model.heads=4 must be divisible by model.kv_heads=3"),
        ({"rotary": "pairs", "rotary_width": 3}, "rotary_width=3 must be even"),
        ({"context": 8, "positions": 4}, "model.context=8 is more than the model.positions=4"),
        ({"head_bias": True}, "model.head_bias needs --model.no-tied"),
    ],
)
def test_forms_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**changes)


def test_parameters_are_cut_over_fast_devices_by_rules():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    apply, params = split_decoder(dataclasses.replace(LLAMA, layers=2))
    specs = sharding.specs(params, mesh, "fsdp")
    blocks = specs["blocks"]
    assert specs["embed"]["embedding"] == P(None, "fsdp")
    assert blocks["qkv"] == {"kernel": P(None, "fsdp"), "bias": P()}
    assert blocks["down"]["kernel"] == P(None, None, "fsdp")
    assert blocks["norm_mlp"]["scale"] == P()
    odd = {"head": {"kernel": jax.ShapeDtypeStruct((257, 16), "float32")}}
    assert sharding.specs(odd, mesh, "fsdp")["head"]["kernel"] == P()
    placed = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    loss = lambda params: jnp.sum(jnp.sin(apply(params, TOKENS)))
    expected, found = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(loss))(placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), found, expected)
