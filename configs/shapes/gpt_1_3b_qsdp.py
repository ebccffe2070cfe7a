"""GPT-1.3B with QSDP: 24 layers, width 2,048, 24,800 steps of 512 sequences.

    python -m train configs/shapes/gpt_1_3b_qsdp.py --report    # trains nothing

The recipe of configs/shapes/gpt_125m_qsdp.py with another size. Training is for accelerators, and
has not been tried.

One replica sends 14,648,068,184 bytes a step, 4.2 times fewer than by float32.
"""

import dataclasses

from configs.shapes import gpt_125m_qsdp
from train.config import Config


def get_config() -> Config:
    """The run of GPT-125M with another size, rate, length and batch."""
    small = gpt_125m_qsdp.get_config()
    return dataclasses.replace(
        small,
        name="gpt_1_3b_qsdp",
        steps=24_800,
        optimizer=dataclasses.replace(small.optimizer, learning_rate=2e-4),
        model=dataclasses.replace(small.model, layers=24, width=2048, heads=16),
        data=dataclasses.replace(small.data, batch=512),
    )
