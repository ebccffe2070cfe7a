"""The nano task with 1-bit Adam: dense until the variance is frozen, then 1-bit momenta.

    python -m train configs/nano_one_bit_adam.py

The same model, data and order as configs/nano_dense.py; the first 150 steps are dense.

One replica sends 164,064 bytes in a step after them, 31 times fewer than dense.
Validation loss 1.457 and 1.508 (two seeds), at half the rate 1.470 and 1.487; frozen after 250
steps 1.424, 1.473 and 1.413 (three seeds).
"""

import dataclasses

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_dense.get_config()
    update = "one_bit_adam(learning_rate, axis_name, freeze_step=150)"
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_one_bit_adam", optimizer=optimizer)
