"""The nano task behind an 8-bit mean: Adam, gradients in 8-bit blocks with error feedback.

    python -m train configs/nano_8bit.py

The same model, data and order as configs/nano_dense.py.

One replica sends 1,314,438 bytes a step; the loss it reaches has not been measured yet.
"""

import dataclasses

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another exchange."""
    dense = nano_dense.get_config()
    update = "chain(compressed_mean(quantize(8), axis_name), adam(learning_rate))"
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_8bit", optimizer=optimizer)
