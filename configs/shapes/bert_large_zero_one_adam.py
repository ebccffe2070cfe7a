"""BERT-Large with 0/1 Adam, the first phase: 24 layers, width 1,024, sequences of 128.

    python -m train configs/shapes/bert_large_zero_one_adam.py --report    # trains nothing

The plan of configs/shapes/bert_base_zero_one_adam.py, whose docstring says what differs from BERT,
over 152,511 steps, with all blocks under one scan, without which the compiler takes above 6 GiB.
Training is for accelerators, and has not been tried.

One replica sends 41,449,145 bytes a step on average, 56 times fewer than dense float32.
"""

import dataclasses

from configs.shapes import bert_base_zero_one_adam
from train.config import Config


def get_config() -> Config:
    """The Base run with another size and length."""
    base = bert_base_zero_one_adam.get_config()
    optimizer = dataclasses.replace(
        base.optimizer,
        final_fraction=0.067,  # 0.99^((152,511 - 12,500) / 520)
    )
    model = dataclasses.replace(base.model, layers=24, width=1024, heads=16, scan=True)
    return dataclasses.replace(
        base, name="bert_large_zero_one_adam", steps=152_511, optimizer=optimizer, model=model
    )
