"""GPT-NeoX-20B with CocktailSGD, whose authors fine-tuned it: four hosts of eight devices.

    python -m train configs/shapes/gpt_neox_20b_cocktail.py --report    # trains nothing

The recipe of configs/shapes/opt_1_3b_cocktail.py, and GPT-NeoX's own form. Adam's first moment is
kept in bfloat16. What a device holds: docs/fine_tune.md. Training has not been tried.
"""

import dataclasses

from configs.shapes import opt_1_3b_cocktail
from train.config import Config
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run of OPT-1.3B with another model."""
    opt = opt_1_3b_cocktail.get_config()
    model = DecoderConfig(
        layers=44,
        width=6144,
        heads=64,
        context=2048,
        vocab=50_432,
        norm_eps=1e-5,
        residual="parallel",
        rotary="halves",
        rotary_width=24,
        tied=False,
        dtype="bfloat16",
        scan=True,
        remat=True,
    )
    update = opt.optimizer.update.replace(
        "weight_decay=0.01", "weight_decay=0.01, mu_dtype='bfloat16'"
    )
    optimizer = dataclasses.replace(opt.optimizer, update=update)
    return dataclasses.replace(opt, name="gpt_neox_20b_cocktail", model=model, optimizer=optimizer)
