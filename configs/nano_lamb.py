"""The nano task with a large batch: LAMB on the exact mean of gradients of 8 replicas.

    python -m train configs/nano_lamb.py

The model and data of configs/nano_dense.py, with 8 times the sequences a step and an eighth of the
steps; the baseline of the other large-batch configs. One replica sends 5,899,264 bytes a step; its
validation loss is 2.140, 2.183 and 2.177 nats per byte (three seeds).
"""

import dataclasses

from configs import nano_dense
from train.config import Config, Optimizer


def get_config() -> Config:
    """The run; other large-batch configs replace its `name` and `optimizer`."""
    dense = nano_dense.get_config()
    return dataclasses.replace(
        dense,
        name="nano_lamb",
        steps=dense.steps // 8,
        replicas=8,
        data=dataclasses.replace(dense.data, batch=8 * dense.data.batch),
        eval_every=25,
        optimizer=Optimizer(
            update="chain(compressed_mean(identity(), axis_name), lamb(learning_rate))",
            learning_rate=2e-2,
            warmup_steps=12,
        ),
    )
