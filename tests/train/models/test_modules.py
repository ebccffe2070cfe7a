"""Modules of all models: each parameter is drawn by a key of its own."""

import jax
import pytest

from train.models.decoder import Decoder, DecoderConfig
from train.models.modules import PathRngs, split
from train.models.resnet import ResNet, ResNetConfig
from train.models.swin import Swin, SwinConfig
from train.models.vit import ViT, ViTConfig

OTHER_FORM = {"norm": "rms", "rotary": "halves", "gated": True, "qk_norm": True, "tied": False}
MODELS = [
    (Decoder, DecoderConfig()),
    (Decoder, DecoderConfig(**OTHER_FORM)),
    (ResNet, ResNetConfig()),
    (ViT, ViTConfig()),
    (Swin, SwinConfig()),
]


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_a_parameter_is_drawn_by_the_key_of_its_path(model, config, monkeypatch):
    drawn, params = [], PathRngs.params
    monkeypatch.setattr(PathRngs, "params", lambda self: drawn.extend(self.paths) or params(self))
    shapes = jax.eval_shape(lambda: split(model(config, rngs=PathRngs(0)))[1])
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    modules = ["".join(entry.key for entry in path[:-1]) for path, _ in leaves]
    assert sorted(drawn) == sorted(modules)


@pytest.mark.parametrize(("model", "config"), [*MODELS, (Decoder, DecoderConfig(lora=2))])
def test_parameters_are_float32_also_where_float64_is_enabled(model, config):
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: split(model(config, rngs=PathRngs(0)))[1])
    assert {x.dtype.name for x in jax.tree.leaves(shapes)} == {"float32"}
