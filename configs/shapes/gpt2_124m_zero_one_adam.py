"""GPT-2 of 124 M parameters with 0/1 Adam: 12 layers, width 768, context 1,024, bytes as tokens.

    python -m train configs/shapes/gpt2_124m_zero_one_adam.py --report    # trains nothing

The size, batch and schedule of configs/shapes/gpt2_124m_cocktail.py; the paper's policies for the
variance and the intervals (kappa = 16, at most 16 steps). Training is for accelerators, and has not
been tried.

One replica sends 24,948,084 bytes a step on average, 35 times fewer than dense float32.
"""

import dataclasses

from configs.shapes import gpt2_124m_cocktail
from train.config import Config


def get_config() -> Config:
    """The CocktailSGD run with another method."""
    cocktail = gpt2_124m_cocktail.get_config()
    update = (
        "zero_one_adam(learning_rate, axis_name, b2=0.95, "
        "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
        "variance_at=schedules.growing(until=warmup_steps), weight_decay=0.1)"
    )
    optimizer = dataclasses.replace(cocktail.optimizer, update=update)
    return dataclasses.replace(cocktail, name="gpt2_124m_zero_one_adam", optimizer=optimizer)
