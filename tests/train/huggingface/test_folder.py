"""Folders that transformers has written: the same logits and text, and back bit for bit."""

import dataclasses
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from train import generate
from train.huggingface import folder, safetensors, settings
from train.models import modules, sharding
from train.models.decoder import Decoder
from train.models.modules import PathRngs

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "huggingface"
KINDS = sorted(path.name for path in GOLDEN.iterdir())


def loaded(path, **changes):
    """Apply, parameters and model of a folder, on one device."""
    config = dataclasses.replace(settings.read(path)[1], **changes)
    apply, like = shapes(config)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)
    return apply, folder.load(path, config, like), config


def shapes(config):
    return modules.split(nnx.eval_shape(lambda: Decoder(config, rngs=PathRngs(0))))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_text_are_those_of_transformers(kind):
    apply, params, _ = loaded(GOLDEN / kind, scan=True, stacks=2 if kind == "gpt_neox" else 1)
    expected = np.load(GOLDEN / kind / "expected.npz")
    logits = jax.jit(apply)(params, expected["tokens"].astype(np.int32))
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    prompt, count = expected["tokens"][:, :5], expected["generated"].shape[1] - 5
    room = np.pad(prompt, ((0, 0), (0, count)))
    say = lambda p: generate.continued(lambda t: apply(p, t), room, np.full(len(room), 5), count)
    np.testing.assert_array_equal(jax.jit(say)(params)[0], expected["generated"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_was_loaded(kind, tmp_path):
    scanned = {"scan": True, "stacks": 2} if kind == "gpt_neox" else {}
    _, params, config = loaded(GOLDEN / kind, **scanned)
    folder.save(tmp_path / "same", config, params, np.float32, like=GOLDEN / kind)
    before, after = (safetensors.read_all(path) for path in (GOLDEN / kind, tmp_path / "same"))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array.astype(np.float32), after[name], strict=True)
    folder.save(tmp_path / "other", config, params)  # nobody says which kind it is
    _, again, _ = loaded(tmp_path / "other")
    _, first, _ = loaded(GOLDEN / kind)
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_shards_are_read_by_the_devices_that_hold_them():
    config = dataclasses.replace(settings.read(GOLDEN / "gpt_neox")[1], scan=True)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    _, like = shapes(config)
    place = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    placed = folder.load(
        GOLDEN / "gpt_neox", config, jax.tree.map(place, like, sharding.specs(like, mesh, "fsdp"))
    )
    kernel = placed["blocks"]["up"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 8, 24)}
    _, whole, _ = loaded(GOLDEN / "gpt_neox", scan=True)
    jax.tree.map(np.testing.assert_array_equal, placed, whole)


def changed(tmp_path, kind, **fields):
    """A copy of a folder whose config.json says something else."""
    path = tmp_path / kind
    shutil.copytree(GOLDEN / kind, path)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(said | fields))
    return path


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"model_type": "mixtral"}, "model_type='mixtral'.* needs one of gpt2"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ("qwen2", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "='linear'"),
        ("llama", {"hidden_act": "relu2"}, "activation='relu2'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim=8"),
        ("gptj", {"rotary_dim": None}, "rotary_dim=None"),
        (
            "qwen2",
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 4}
            | {"max_window_layers": 1},
            "layer_types=.*layers that are all alike",
        ),
        # What the arrays show, though config.json does not say so.
        (
            "qwen2",
            {"num_hidden_layers": 1, "layer_types": None},
            "12 arrays that a qwen2 has no place for",
        ),
        ("llama", {"attention_bias": True}, "has no array 'model.layers.0.self_attn.k_proj.bias'"),
        ("gpt2", {"vocab_size": 299}, r"wte.weight of \[\(300, 16\)\], which does not make embed"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(kind, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        loaded(changed(tmp_path, kind, **fields))


def test_settings_of_earlier_transformers_mean_the_same(tmp_path):
    rope = json.loads((GOLDEN / "llama" / "config.json").read_text())["rope_parameters"]
    old = {"rope_theta": rope.pop("rope_theta"), "rope_parameters": None, "rope_scaling": rope}
    assert settings.read(changed(tmp_path, "llama", **old)) == settings.read(GOLDEN / "llama")
    old = {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 10_000}
    assert settings.read(changed(tmp_path, "gpt_neox", **old)) == settings.read(GOLDEN / "gpt_neox")


BARE = {"gpt2": "transformer.", "opt": "model.", "gpt_neox": "gpt_neox.", "llama": "model."}


def bare(tmp_path, kind):
    """A copy of a folder as the model without its output matrix names its arrays."""

    def shorter(arrays):
        for name in [*arrays]:
            arrays[name.removeprefix(BARE[kind])] = arrays.pop(name)
        arrays["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.uint8)  # a mask, no parameter
        arrays["h.0.attn.masked_bias"] = np.float32(-1e9)

    return with_arrays(tmp_path, kind, shorter)


@pytest.mark.parametrize("kind", BARE)
def test_checkpoints_of_a_bare_model_have_shorter_names(tmp_path, kind):
    _, found, _ = loaded(bare(tmp_path, kind))
    _, expected, _ = loaded(GOLDEN / kind)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def with_arrays(tmp_path, kind, change, **fields):
    """A copy of a folder in whose arrays a function changes something."""
    path = changed(tmp_path, kind, **fields)
    arrays = {name: np.array(array) for name, array in safetensors.read_all(path).items()}
    change(arrays)
    for file in path.glob("model*.safetensors"):
        file.unlink()
    safetensors.write(path / "model.safetensors", arrays)
    return path


@pytest.mark.parametrize("kind", ["gpt2", "opt", "qwen2", "llama", "gpt_neox"])
def test_a_tied_model_uses_all_that_its_file_has(tmp_path, kind):
    embed, head = {
        "gpt2": ("transformer.wte.weight", "lm_head.weight"),
        "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
        "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    }.get(kind, ("model.embed_tokens.weight", "lm_head.weight"))

    def equal(arrays):
        arrays[head] = arrays[embed].copy()

    def other(arrays):
        equal(arrays)
        arrays[head][-1, -1] += 1

    def shorter(arrays):
        arrays[head] = arrays[embed][:-1].copy()

    tied = {"tie_word_embeddings": True}
    apply, params, config = loaded(with_arrays(tmp_path / "equal", kind, equal, **tied))
    assert config.tied and "head" not in params
    for name, change in (("other", other), ("shorter", shorter)):
        path = with_arrays(tmp_path / name, kind, change, **tied)
        with pytest.raises(ValueError, match=f'another {head} than {embed}.*ings": false there'):
            loaded(path)
    path = with_arrays(tmp_path / "untied", kind, other, tie_word_embeddings=False)
    assert "head" in loaded(path)[1]


@pytest.mark.parametrize("dtype", ["I64", "BOOL"])
def test_weights_are_floats(tmp_path, dtype):
    def change(arrays):
        name = "model.layers.1.mlp.up_proj.weight"
        arrays[name] = np.ones(arrays[name].shape, safetensors.DTYPES[dtype])

    with pytest.raises(ValueError, match=r"up_proj.weight as .*, which are no weights; they must"):
        loaded(with_arrays(tmp_path, "llama", change))


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e300])
def test_weights_are_finite_in_the_run_s_dtype(tmp_path, value):
    def change(arrays):
        name = "model.layers.1.mlp.up_proj.weight"
        arrays[name] = arrays[name].astype(np.float64)
        arrays[name][3, 5] = value

    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight holds NaN or infinities"):
        loaded(with_arrays(tmp_path, "llama", change))


def test_numbers_beyond_the_dtype_of_an_export_are_refused(tmp_path):
    def change(arrays):
        arrays["transformer.h.1.mlp.c_fc.weight"][0, 0] = 1e5

    path = with_arrays(tmp_path, "gpt2", change)
    _, params, config = loaded(path)
    text = "h.1.mlp.c_fc.weight holds NaN, or numbers too large for float16"
    with pytest.raises(ValueError, match=text):
        folder.save(tmp_path / "half", config, params, np.float16, like=path)
    assert not (tmp_path / "half").exists()


def test_no_memory_is_taken_for_a_size_that_only_config_json_has(tmp_path):
    path = changed(tmp_path, "llama", vocab_size=2**31 - 1, max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"embed_tokens.weight of .*, which does not make embed"):
        loaded(path)


def test_a_model_of_another_form_than_the_run_s_is_refused():
    config = settings.read(GOLDEN / "gpt2")[1]
    with pytest.raises(ValueError, match=r"model.heads=4, there 2.*Write model=Pretrained\(\)"):
        folder.load(GOLDEN / "gpt2", dataclasses.replace(config, heads=4), None)


def test_a_model_that_no_form_computes_is_not_saved(tmp_path):
    config = dataclasses.replace(settings.read(GOLDEN / "gpt2")[1], qk_norm=True)
    with pytest.raises(ValueError, match="no model_type of gpt2, .* computes"):
        folder.save(tmp_path / "none", config, {})
