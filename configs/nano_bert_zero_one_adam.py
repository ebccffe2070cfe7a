"""BERT's twin of the nano task by 0/1 Adam, whose authors trained BERT.

    python -m train configs/nano_bert_zero_one_adam.py

The method of configs/nano_zero_one_adam.py, but that the variance is learned from more gradients,
by kappa = 64, on the task of configs/nano_bert_dense.py. Validation loss after 1,000 steps, at the
seeds 0 and 1, 2.147 and 2.716, dense 1.969 and 2.211: both begin on a plateau. After 3,000 steps
1.697 (seed 1), dense 1.214.
"""

import dataclasses

from configs import nano_bert_dense
from train.config import Config


def get_config() -> Config:
    """The dense run with another method."""
    dense = nano_bert_dense.get_config()
    meet = "schedules.halving(learning_rate, steps, after=warmup_steps)"
    update = (
        f"zero_one_adam(learning_rate, axis_name, sync_at={meet}, warmup_steps=warmup_steps, "
        f"variance_at=schedules.both(schedules.growing(64), {meet}), "
        "variance_compressor=quantize(8))"
    )
    optimizer = dataclasses.replace(dense.optimizer, update=update, learning_rate=3e-3)
    return dataclasses.replace(dense, name="nano_bert_zero_one_adam", optimizer=optimizer)
