"""The nano task by CocktailSGD: local Adam, compressed differences of models, one step late.

    python -m train configs/nano_cocktail.py

The same model, data and order as configs/nano_dense.py. The authors' compressor, 0.1825 bits per
parameter and direction, after 100 dense steps.

One replica sends 28,878 bytes in a step after them, 175 times fewer than dense, and 596,528 in the
mean over the run; validation loss after 1,000 steps 1.537 nats per byte (one seed; dense 1.407).
"""

import dataclasses

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_dense.get_config()
    update = "cocktail_sgd(adam(learning_rate), axis_name, warmup_steps=warmup_steps)"
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_cocktail", optimizer=optimizer)
