"""The nano task with CocktailSGD: local Adam, compressed differences of models, one step late.

    python -m train configs/nano_cocktail.py

The same model, data and order as configs/nano_dense.py. The authors' factors, 0.1838 bits per
parameter and direction, after 100 dense steps.

One replica sends 29,184 bytes in a step after them, 173 times fewer than dense, and 596,803 on
average over the run; validation loss after 1,000 steps 1.550 nats per byte (one seed; dense 1.407,
and 1.537 by the authors' pattern, `compose(random_k(0.1, "strided"), top_k(0.2), quantize(4))`).
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
