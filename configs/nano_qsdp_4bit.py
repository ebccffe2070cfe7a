"""The nano task with parameters in shards: weights and gradients travel in 4 bits.

    python -m train configs/nano_qsdp_4bit.py

As configs/nano_qsdp.py, with half its bytes. Random rotations take outliers from the blocks, and
the levels are learned, of each parameter's weights and gradients.

One replica sends 992,458 bytes a step in the mean, 221,184 more in each of ten that fit levels.
"""

import dataclasses

from configs import nano_qsdp
from train.config import Config


def get_config() -> Config:
    """The run of eight bits, with other codes."""
    return dataclasses.replace(
        nano_qsdp.get_config(),
        name="nano_qsdp_4bit",
        qsdp="qsdp(axis_name, rotated(learned_levels(4)), "
        "rotated(learned_levels(4, rounding='stochastic')))",
    )
