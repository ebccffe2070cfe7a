"""Runs that begin with a Hugging Face folder, and end as one."""

import dataclasses
import json
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.train.huggingface.test_folder import GOLDEN, loaded
from train import export, loop
from train.checkpoints import resume, store
from train.config import Config, Data, Optimizer
from train.config import run as configs
from train.huggingface import folder, safetensors, settings
from train.huggingface.pretrained import Pretrained
from train.models import build, lora
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig

UPDATE = "local_steps(adam(learning_rate), axis_name, every=4)"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of two steps from GPT-2's folder, whose replicas end apart from each other.

    It is in the default `runs_dir`, which is relative.
    """
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again\n" * 40)
    return Config(
        name="tuned",
        steps=2,
        optimizer=Optimizer(UPDATE, 1e-3),
        replicas=2,
        eval_batches=1,
        per_layer=False,
        start_from=str(GOLDEN / "gpt2"),
        model=Pretrained(context=8, dtype="float32"),
        data=Data(path=str(text), batch=4),
    )


def test_a_run_from_a_folder_is_exported_as_one(config, tmp_path, capsys, monkeypatch):
    assert isinstance(config.model, DecoderConfig) and config.model.positions == 16
    task = loop.make_task(config)
    monkeypatch.setattr(loop, "make_task", lambda config: task)
    rows = loop.run(config)
    run, to = pathlib.Path(config.runs_dir, "tuned"), tmp_path / "exported"
    export.main([str(run), str(to)])
    assert f"{to} holds the model of {run}" in capsys.readouterr().out
    _, params, _ = loaded(to, scan=True, context=8)
    # Evaluated as the run has: what its replicas have learned since they met is in it.
    loss = task.evaluate(jax.tree.map(np.asarray, params))["loss"]
    assert float(loss) == pytest.approx(rows[-1]["val_loss"], rel=1e-6)
    assert rows[-1]["val_loss"] != rows[0]["val_loss"]
    first = loaded(GOLDEN / "gpt2", scan=True)[1]
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), first, params)
    assert all(jax.tree.leaves(changed["blocks"]))
    there, here = (json.loads((path / "config.json").read_text()) for path in (GOLDEN / "gpt2", to))
    assert here == there
    tokenizer = "tokenizer.json"
    assert (to / tokenizer).read_bytes() == (GOLDEN / "gpt2" / tokenizer).read_bytes()
    # A run from that run knows where it all began; half as many bytes hold the nearest values.
    again = dataclasses.replace(config, name="again", start_from=str(run))
    assert export.origin(again.start_from) == GOLDEN / "gpt2"
    export.main([str(run), str(tmp_path / "half"), "--dtype", "bfloat16"])
    half = safetensors.read_all(tmp_path / "half")
    for name, array in safetensors.read_all(to).items():
        np.testing.assert_array_equal(array.astype(half[name].dtype), half[name], strict=True)


def test_lora_begins_with_a_folder_and_ends_as_one(config, tmp_path):
    model = dataclasses.replace(config.model, lora=2)
    config = dataclasses.replace(config, model=model, trainable=lora.TRAINED)
    mesh = jax.make_mesh((2,), ("replica",))
    natural, everywhere = build.param_shapes(config), NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda _: everywhere, natural)
    task = SimpleNamespace(config=config, natural=natural, places=places)
    params = resume._pretrained(task, config.start_from)
    whole = loaded(GOLDEN / "gpt2", scan=True)[1]
    jax.tree.map(np.testing.assert_array_equal, lora.merged(params, model.lora_scale), whole)
    thin = params["blocks"]["qkv"]
    assert np.all(thin["lora_b"] == 0) and 0.1 < np.std(thin["lora_a"]) < 0.5
    thin["lora_b"] += 1
    folder.save(tmp_path / "to", model, params)
    expected = lora.merged(params, model.lora_scale)
    found = loaded(tmp_path / "to", scan=True)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_what_is_no_language_model_is_not_exported(tmp_path, capsys, monkeypatch):
    saved = {"config": {"objective": "classify", "model": {"type": "ResNetConfig"}}}
    monkeypatch.setattr(store, "read_metadata", lambda directory: saved)
    with pytest.raises(SystemExit, match="2"):
        export.main([str(tmp_path), str(tmp_path / "to")])
    assert "is not a model that continues text" in capsys.readouterr().err


def test_the_tokenizer_of_a_run_from_nothing_goes_along(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokenizer.json").write_text("{}")
    words = {"data": {"tokenizer": str(tmp_path / "words")}}
    _, params, model = loaded(GOLDEN / "gpt2")
    folder.save(tmp_path / "to", model, params, tokenizer=export.tokenizer_of(words))
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "{}"
    folder.save(tmp_path / "words", model, params, tokenizer=export.tokenizer_of(words))
    assert (tmp_path / "words" / "tokenizer.json").read_text() == "{}"
    assert export.tokenizer_of({"data": {"tokenizer": str(tmp_path / "gone")}}) is None
    assert export.tokenizer_of({"data": {}}) is None


def test_a_folder_that_is_gone_is_told(tmp_path, capsys):
    assert export.origin(None) is None
    assert export.origin(str(tmp_path / "gone")) is None
    assert "gone is gone; --like FOLDER" in capsys.readouterr().err


def test_the_command_line_names_the_folder_of_a_pretrained_model(config, tmp_path):
    path = tmp_path / "fine_tune.py"
    path.write_text(
        "from train.config import Config, Optimizer\n"
        "from train.huggingface.pretrained import Pretrained\n\n\n"
        "def get_config():\n"
        "    update = 'adamw(learning_rate)'\n"
        "    return Config('a', 10, Optimizer(update, 1e-3), model=Pretrained())\n"
    )
    args = ["--start-from", config.start_from, "--model.context", "8"]
    made = configs.load(str(path), args)
    assert made.model == dataclasses.replace(config.model, dtype="bfloat16")
    with pytest.raises(ValueError, match="needs a pretrained model; write --start-from FOLDER"):
        configs.load(str(path))
    assert made.data.tokenizer == config.start_from
    other = dataclasses.replace(made.data, tokenizer="other")
    assert dataclasses.replace(config, model=Pretrained(8), data=other).data.tokenizer == "other"
    with pytest.raises(ValueError, match="is no Hugging Face folder"):
        dataclasses.replace(config, model=Pretrained(), start_from=str(tmp_path))
    with pytest.raises(ValueError, match="model.context=1024 is more than the model.positions=16"):
        dataclasses.replace(config, model=Pretrained())


def test_a_folder_needs_a_decoder(config):
    with pytest.raises(ValueError, match="the model a ResNetConfig; write model=Pretrained"):
        settings.require_same(ResNetConfig(), config.model, "there")
