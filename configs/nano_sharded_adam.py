"""The nano task with Adam cut over the replicas: 4-bit gradients there, 4-bit differences back.

    python -m train configs/nano_sharded_adam.py

The same model, data and order as configs/nano_dense.py; each replica keeps a quarter of Adam.
"""

import dataclasses

from configs import nano_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_dense.get_config()
    update = "sharded_optimizer(adam(learning_rate), axis_name)"
    optimizer = dataclasses.replace(dense.optimizer, update=update)
    return dataclasses.replace(dense, name="nano_sharded_adam", optimizer=optimizer)
