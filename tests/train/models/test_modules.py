"""Modules of all models: each parameter is drawn by a key of its own."""

import jax
import pytest

from train.models.decoder import Decoder, DecoderConfig
from train.models.modules import PathRngs, split
from train.models.resnet import ResNet, ResNetConfig
from train.models.swin import Swin, SwinConfig
from train.models.vit import ViT, ViTConfig

OTHER_FORM = {"norm": "rms", "rotary": "halves", "gated": True, "qk_norm": True, "tied": False}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (Decoder, DecoderConfig()),
        (Decoder, DecoderConfig(**OTHER_FORM)),
        (ResNet, ResNetConfig()),
        (ViT, ViTConfig()),
        (Swin, SwinConfig()),
    ],
)
def test_a_parameter_is_drawn_by_the_key_of_its_path(model, config, monkeypatch):
    drawn, params = [], PathRngs.params
    monkeypatch.setattr(PathRngs, "params", lambda self: drawn.extend(self.paths) or params(self))
    shapes = jax.eval_shape(lambda: split(model(config, rngs=PathRngs(0)))[1])
    leaves, _ = jax.tree_util.tree_flatten_with_path(shapes)
    modules = ["".join(entry.key for entry in path[:-1]) for path, _ in leaves]
    assert sorted(drawn) == sorted(modules)
