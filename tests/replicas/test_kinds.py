"""Labels of leaves: on the trees of train's models, of Flax, and on names of other libraries."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomp
from configs import nano_dense
from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.kinds import kind_of
from train.huggingface.weights import NAMES
from train.models.decoder import DecoderConfig
from train.placement import build

MATRIX = np.ones((4, 6), np.float32)


def labels(tree):
    """The label of each path."""
    of = jax.tree_util.tree_leaves_with_path(jaxcomp.leaf_kinds(tree))
    return {path_of(path): label for path, label in of}


def decoder(**options):
    model = DecoderConfig(layers=2, width=8, heads=2, context=4, vocab=256, **options)
    config = dataclasses.replace(nano_dense.get_config(), model=model)
    return jax.eval_shape(lambda: build.random_params(config))


BLOCK = {"qkv/kernel", "out/kernel", "up/kernel", "down/kernel"}


def test_matrices_of_the_decoder_are_those_of_its_blocks():
    found = labels(decoder(tied=False))
    of = lambda kind: {path for path, label in found.items() if label == kind}
    assert of("matrix") == {f"block_{i}/{name}" for i in range(2) for name in BLOCK}
    assert of("embedding") == {"embed/embedding", "position"}
    assert of("head") == {"head/kernel"}
    assert all(path.endswith(("bias", "scale")) for path in of("vector"))


def test_layers_of_a_scan_have_the_labels_of_blocks_apart():
    stacked = jaxcomp.by_path(("^blocks/", True), (".*", False))
    seen = []

    def init(params):
        seen.append(labels(params))
        return optax.EmptyState()

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), decoder(scan=True))
    jaxcomp.per_layer(tx, stacked).init(params)
    apart = {path.replace("block_", "blocks/"): kind for path, kind in labels(decoder()).items()}
    assert seen == [apart]


def test_vectors_are_vectors_also_in_a_stack():
    stacked = labels(decoder(scan=True))
    assert {path for path, kind in stacked.items() if kind == "matrix"} == {
        f"blocks/{name}" for name in BLOCK
    }


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        x = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return nn.Dense(16, name="lm_head")(nn.Dense(8)(x))


def test_attention_of_linen_has_matrices_of_three_axes_and_biases_of_two():
    tokens = jnp.zeros((1, 3), jnp.int32)
    variables = jax.eval_shape(LinenBlock().init, jax.random.key(0), tokens)
    found, attention = labels(variables), "params/MultiHeadDotProductAttention_0"
    assert variables["params"]["MultiHeadDotProductAttention_0"]["query"]["bias"].ndim == 2
    for name in ("query", "key", "value", "out"):
        assert found[f"{attention}/{name}/kernel"] == "matrix"
        assert found[f"{attention}/{name}/bias"] == "vector"
    assert found["params/Embed_0/embedding"] == "embedding"
    assert found["params/lm_head/kernel"] == "head"
    assert found["params/Dense_0/kernel"] == "matrix"


def test_the_state_of_an_nnx_model_has_labels():
    model = nnx.Sequential(nnx.Embed(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    assert sorted(labels(nnx.state(model, nnx.Param)).values()) == ["embedding", "matrix", "vector"]


@pytest.mark.parametrize("model", NAMES)
def test_names_of_hugging_face_have_the_labels_of_our_own(model):
    names = NAMES[model]
    path = lambda name: f"{names.base}{name}.weight".replace(".", "/")
    for own, name in names.outside.items():
        assert kind_of(path(name), MATRIX) == {"norm": "vector"}.get(own, "embedding")
    for own, parts in names.inside.items():
        for part in parts:
            kind = "vector" if own.startswith("norm") else "matrix"
            assert kind_of(path(names.blocks.format(3) + part), MATRIX) == kind
    assert kind_of(f"{names.head}/weight", MATRIX) == "head"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("layers/0/attention/query_proj/weight", "matrix"),  # Equinox
        ("blocks/0/multi_head/query", "matrix"),
        ("bert/encoder/layer/0/attention/output/dense/weight", "matrix"),
        ("encoder/0/positionwise_ffn/w_1", "matrix"),
        ("block_0/qkv/lora_a", "matrix"),
        ("a", "matrix"),
        ("", "matrix"),
        ("params/output/kernel", "head"),  # Llama's own code
        ("unembed/W_U", "head"),
        ("classifier/weight", "head"),
        ("tok_embeddings/weight", "embedding"),
        ("pos_emb", "embedding"),
        ("stage_0/block_1/attention/position", "embedding"),  # Swin
        ("attn/relative_position_bias_table", "embedding"),
        ("h/0/ln_1/weight", "vector"),
        ("ln_f/g", "vector"),
        ("layers/0/rms_norm/w", "vector"),
        ("params/attention/query/bias", "vector"),
    ],
)
def test_a_path_has_its_label(path, kind):
    assert kind_of(path, MATRIX) == kind


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (4, 1), (1, 4, 1), (0, 4)])
def test_what_is_no_matrix_is_a_vector(shape):
    assert kind_of("up/kernel", np.zeros(shape)) == "vector"


def test_each_kind_has_an_optimizer_of_its_own():
    names = {"matrix": "kernel", "embedding": "embed", "head": "head", "vector": "bias"}
    params = {name: jnp.zeros(8 if name == "bias" else (4, 8)) for name in names.values()}
    rates = {kind: float(number) for number, kind in enumerate(names, 2)}
    for named in (list(rates), ["embedding"], []):
        tx = jaxcomp.by_kind(optax.sgd(1.0), **{kind: optax.sgd(rates[kind]) for kind in named})
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
        for kind, name in names.items():
            rate = rates[kind] if kind in named else 1.0
            np.testing.assert_array_equal(updates[name], -rate * jnp.ones_like(params[name]))


def test_an_optimizer_without_leaves_is_left_out():
    """Methods refuse a tree without leaves."""
    tx = jaxcomp.by_kind(optax.sgd(1.0), embedding=optax.adam(1.0))
    assert set(tx.init({"kernel": jnp.ones((4, 8))}).inner_states) == {"others"}
