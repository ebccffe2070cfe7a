"""Every config file of configs/ trains, in a size that takes a moment."""

import dataclasses
import pathlib

import numpy as np
import pytest

from tests.helpers import pictures
from tests.helpers.launching import TINY_ARGS, words
from train import loop
from train.config import run as configs
from train.huggingface import folder
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig
from train.models.swin import SwinConfig
from train.models.vit import ViTConfig

pytestmark = pytest.mark.usefixtures("undrawn")

ROOT = pathlib.Path(__file__).parents[2]
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


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("[!_]*.py")), ids=lambda p: p.stem)
def test_config_file_trains(path, tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    config = tiny(path)
    assert config.name == path.stem
    if config.start_from is not None and not folder.is_folder(config.start_from):
        first = tiny(path.with_name(f"{pathlib.Path(config.start_from).name}.py"))
        loop.run(first)
        config = dataclasses.replace(config, start_from=str(tmp_path / first.name))
    rows = loop.run(config)
    assert rows[-1]["step"] == 2 and rows[-1]["skipped"] == 0
    assert np.isfinite(rows[-1]["val_loss"])
