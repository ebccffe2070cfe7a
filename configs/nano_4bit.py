"""The nano task behind a 4-bit mean: Adam, gradients in 4-bit blocks with error feedback.

    python -m train configs/nano_4bit.py

The same model, data and order as configs/nano_dense.py.
"""

import dataclasses

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another exchange."""
    dense = nano_dense.get_config()
    update = "chain(compressed_mean(quantize(4), axis_name), adam(learning_rate))"
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_4bit", optimizer=optimizer)
