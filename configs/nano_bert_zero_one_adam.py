"""BERT's twin of the nano task by 0/1 Adam, whose authors trained BERT.

    python -m train configs/nano_bert_zero_one_adam.py

The method of configs/nano_zero_one_adam.py, with exact variances, on the task of
configs/nano_bert_dense.py. Its messages of 8 bits in the warm-up take the model off the plateau
that it begins on: validation loss after 1,000 steps 2.006, dense 1.969, without a warm-up 2.661
(one seed each).
"""

import dataclasses

from configs import nano_bert_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_bert_dense.get_config()
    update = (
        "zero_one_adam(learning_rate, axis_name, "
        "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
        "warmup_steps=warmup_steps)"
    )
    optimizer = dataclasses.replace(dense.optimizer, update=update, learning_rate=3e-3)
    return dataclasses.replace(dense, name="nano_bert_zero_one_adam", optimizer=optimizer)
