"""GPT-J-6B with CocktailSGD, whose authors fine-tuned it: four hosts of eight devices.

    python -m train configs/shapes/gpt_j_6b_cocktail.py --report    # trains nothing

The recipe of configs/shapes/opt_1_3b_cocktail.py, and GPT-J's own form. What a device holds:
docs/fine_tune.md. Training has not been tried.
"""

import dataclasses

from configs.shapes import opt_1_3b_cocktail
from train.config import Config
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run of OPT-1.3B with another model."""
    model = DecoderConfig(
        layers=28,
        width=4096,
        heads=16,
        context=2048,
        vocab=50_400,
        norm_eps=1e-5,
        residual="shared",
        rotary="pairs",
        rotary_width=64,
        qkv_bias=False,
        out_bias=False,
        tied=False,
        head_bias=True,
        dtype="bfloat16",
        scan=True,
        remat=True,
    )
    return dataclasses.replace(
        opt_1_3b_cocktail.get_config(), name="gpt_j_6b_cocktail", model=model
    )
