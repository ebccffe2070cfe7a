"""Every config file of configs/ makes a step, and some train, in a small size."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from tests.helpers import pictures
from tests.helpers.launching import ROOT, TINY_ARGS, words
from train import loop
from train.config import run as configs
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig
from train.models.swin import SwinConfig
from train.models.vit import ViTConfig
from train.placement import build, devices
from train.placement.resolve import resolve

pytestmark = pytest.mark.usefixtures("undrawn")

PRETRAINED = f"--start-from {ROOT}/tests/golden/huggingface/gpt2 --model.context 16"
"""Of configs whose model is that of a folder."""
TINY_MODELS = {
    DecoderConfig: TINY_ARGS,
    ResNetConfig: "--model.blocks 1 1 --model.width 8 --eval-batches 1",
    SwinConfig: "--model.blocks 2 2 --model.width 8 --model.heads 2 --model.window 2 "
    "--eval-batches 1",
    ViTConfig: "--model.layers 1 --model.width 16 --model.heads 2 --eval-batches 1",
}


@pytest.fixture
def tiny(tmp_path):
    """Loads a config file in a size that trains in a moment, on data of its kind."""

    def load(path):
        settings = "--steps 2 --data.batch 8 --accumulate 1 --replicas 4"
        of_folder = PRETRAINED.split() if path.stem.startswith("fine_tune") else []
        kind = type(configs.load(str(path), of_folder).model)
        of_model = of_folder or TINY_MODELS[kind].split()
        args = [*settings.split(), *of_model, "--runs-dir", str(tmp_path)]
        if configs.load(str(path), of_folder).in_shards:
            args += "--fast 2 --model.rotary-width 0 --model.mlp 0".split()
        if kind is DecoderConfig:
            return configs.load(str(path), [*args, "--data.path", words(tmp_path / "text")])
        form = configs.load(str(path)).data.form
        folder = tmp_path / form
        folder.mkdir()
        texts = {"digits": pictures.digits, "folder": pictures.folder}[form](folder / "data")
        sizes = {"digits": "", "folder": "--model.classes 2 --model.size 32"}[form]
        return configs.load(str(path), [*args, *sizes.split(), "--data.path", texts])

    return load


FILES = {path.stem: path for path in sorted((ROOT / "configs").rglob("[!_]*.py"))}
# What starts from another run or from a folder, and a folder of images. Digits, hidden bytes and
# shards train in data/test_images.py, models/test_objectives.py and test_evaluation.py.
TRAINED = ["nano_fine_tune_cocktail", "opt_1_3b_cocktail", "resnet18_imagenet_zero_one_adam"]


@pytest.fixture(autouse=True)
def configs_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def forms(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("name", FILES)
def test_the_step_of_a_config_file_is_traced_and_keeps_shapes_and_types(name, tiny):
    config = tiny(FILES[name])
    assert config.name == name
    mesh = devices.make_mesh(config.replicas, config.fast)
    functions, batch = resolve(config).functions(mesh), build.batch_of(config, mesh)
    params, state = jax.eval_shape(lambda: functions.init(build.random_params(config)))
    after, last, _ = jax.eval_shape(functions.step, params, state, batch)
    assert forms((after, last)) == forms((params, state))


@pytest.mark.parametrize("name", TRAINED)
def test_a_config_file_trains(name, tiny, tmp_path):
    config = tiny(FILES[name])
    if config.start_from is not None:
        first = tiny(FILES[pathlib.Path(config.start_from).name])
        loop.run(first)
        config = dataclasses.replace(config, start_from=str(tmp_path / first.name))
    rows = loop.run(config)
    assert rows[-1]["step"] == 2 and rows[-1]["skipped"] == 0
    assert np.isfinite(rows[-1]["val_loss"])
