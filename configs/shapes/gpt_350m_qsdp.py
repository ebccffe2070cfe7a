"""GPT-350M with QSDP: 24 layers, width 1,024, 13,400 steps of 256 sequences.

    python -m train configs/shapes/gpt_350m_qsdp.py --report    # trains nothing

The recipe of configs/shapes/gpt_125m_qsdp.py with another size. Training is for accelerators, and
has not been tried.

One replica sends 3,799,688,244 bytes a step, 4.4 times fewer than by float32.
"""

import dataclasses

from configs.shapes import gpt_125m_qsdp
from train.config import Config


def get_config() -> Config:
    """The run of GPT-125M with another size, rate, length and batch."""
    small = gpt_125m_qsdp.get_config()
    return dataclasses.replace(
        small,
        name="gpt_350m_qsdp",
        steps=13_400,
        optimizer=dataclasses.replace(small.optimizer, learning_rate=3e-4),
        model=dataclasses.replace(small.model, layers=24, width=1024, heads=16),
        data=dataclasses.replace(small.data, batch=256),
    )
