"""LoRA for peft and back: an adapter says what an export with LoRA merged says."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from tests.train.huggingface.test_folder import BARE, GOLDEN, KINDS, bare, loaded
from train import export
from train.huggingface import adapters, folder, safetensors, settings
from train.models import lora
from train.models.decoder import Decoder
from train.models.modules import PathRngs, split


def thin(kind, **changes):
    """A folder's model with LoRA of rank 3 that has learned something."""
    config = dataclasses.replace(settings.read(GOLDEN / kind)[1], lora=3, lora_alpha=6.0, **changes)
    _, drawn = split(Decoder(config, rngs=PathRngs(0)))
    rng = np.random.default_rng(0)
    learned = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype("f4"), lora.only(drawn))
    _, params, _ = loaded(GOLDEN / kind, scan=config.scan)
    return config, lora.combined(jax.tree.map(np.asarray, _with_room(params, drawn)), learned)


def _with_room(params, drawn):
    """Parameters of a folder, with None where the model has LoRA."""
    if not isinstance(drawn, dict):
        return params
    return {name: _with_room((params or {}).get(name), part) for name, part in drawn.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_is_merged_is_the_export(kind, tmp_path):
    config, params = thin(kind, scan=kind != "llama")
    adapters.save(tmp_path / "adapter", config, params, GOLDEN / kind)
    adapters.merge(tmp_path / "adapter", tmp_path / "merged", np.float32, GOLDEN / kind)
    folder.save(tmp_path / "whole", config, params, np.float32, like=GOLDEN / kind)
    found, expected = (safetensors.read_all(tmp_path / name) for name in ("merged", "whole"))
    assert found.keys() == expected.keys()
    before = safetensors.read_all(GOLDEN / kind)
    changed = [name for name in found if not np.array_equal(found[name], before[name])]
    assert len(changed) >= 4 * config.layers
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", BARE)
def test_an_adapter_is_added_to_a_bare_model(kind, tmp_path):
    base = bare(tmp_path, kind)
    config, params = thin(kind)
    adapters.save(tmp_path / "adapter", config, params, base)
    adapters.merge(tmp_path / "adapter", tmp_path / "merged", np.float16, base)
    adapters.merge(tmp_path / "adapter", tmp_path / "whole", np.float16, GOLDEN / kind)
    found, expected = (loaded(tmp_path / name)[1] for name in ("merged", "whole"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_names_and_shapes_are_those_of_peft(tmp_path):
    config, params = thin("llama")
    adapters.save(tmp_path / "adapter", config, params, GOLDEN / "llama")
    arrays = safetensors.read(tmp_path / "adapter" / "adapter_model.safetensors")
    q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    assert arrays[q.format("A")].shape == (3, config.width)
    assert arrays[q.format("B")].shape == (config.heads * config.head_size, 3)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["peft_type"]) == (3, 6.0, "LORA")
    assert about["target_modules"] == sorted(
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_dora": True}, "has use_dora; only plain LoRA is read"),
        ({"alora_invocation_tokens": [1, 2]}, "has alora_invocation_tokens; only plain LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights; only plain LoRA is read"),
        ({"peft_type": "IA3"}, "has another peft_type or bias"),
        ({"r": "3"}, "r is '3'"),
    ],
)
def test_an_adapter_that_is_more_than_lora_is_refused(tmp_path, change, text):
    config, params = thin("gpt2")
    adapters.save(tmp_path / "adapter", config, params, GOLDEN / "gpt2")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=text):
        adapters.merge(tmp_path / "adapter", tmp_path / "to", np.float32, GOLDEN / "gpt2")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    config, params = thin("gpt2")
    adapters.save(tmp_path / "adapter", config, params, GOLDEN / "gpt2")
    with pytest.raises(ValueError, match="has no matrix for 'base_model.model.transformer.h.0"):
        adapters.merge(tmp_path / "adapter", tmp_path / "to", np.float32, GOLDEN / "opt")
    plain = dataclasses.replace(config, lora=0)
    with pytest.raises(ValueError, match="the run has no LoRA to write"):
        adapters.save(tmp_path / "to", plain, params, GOLDEN / "gpt2")
    assert not (tmp_path / "to").exists()


def test_a_run_is_exported_as_an_adapter_that_the_program_merges(tmp_path, monkeypatch, capsys):
    config, params = thin("gpt2")
    recorded = {"trainable": lora.TRAINED, "start_from": str(GOLDEN / "gpt2")}
    monkeypatch.setattr(export, "_read", lambda run: (recorded, config, params))
    export.main(["run", str(tmp_path / "adapter"), "--adapter"])
    like = ["--like", str(GOLDEN / "gpt2")]
    export.main([str(tmp_path / "adapter"), str(tmp_path / "merged"), *like])
    folder.save(tmp_path / "whole", config, params, np.float32, like=GOLDEN / "gpt2")
    for found, expected in zip(
        *(jax.tree.leaves(loaded(tmp_path / name)[1]) for name in ("merged", "whole")), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "adapter"), str(tmp_path / "other")])
    assert "an adapter is added to its base; write --like FOLDER" in capsys.readouterr().err
    recorded["trainable"] = "bias$"
    with pytest.raises(SystemExit):
        export.main(["run", str(tmp_path / "other"), "--adapter"])
    assert "trained bias$, and an adapter has lora_[ab]$ alone" in capsys.readouterr().err
    # Biases that an earlier run trained are in no folder that the adapter could be added to.
    first = tmp_path / "first"
    (first / "checkpoints").mkdir(parents=True)
    earlier = {"trainable": "lora_[ab]$|bias$", "start_from": str(GOLDEN / "gpt2")}
    monkeypatch.setattr(export.store, "choose", lambda checkpoints, item: None)
    monkeypatch.setattr(export, "recorded", lambda saved: earlier)
    recorded |= {"trainable": lora.TRAINED, "start_from": str(first)}
    with pytest.raises(SystemExit):
        export.main(["run", str(tmp_path / "other"), "--adapter"])
    assert f"{first}, with which run began, trained lora_[ab]$|bias$" in capsys.readouterr().err
