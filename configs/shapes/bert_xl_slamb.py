"""A BERT of 2.8 billion parameters with SLAMB: 36 layers, width 2,560.

    python -m train configs/shapes/bert_xl_slamb.py --report    # trains nothing

The size that SLAMB's authors scaled to 1,024 GPUs; the split into layers and width is ours, as is
the recipe, that of configs/shapes/bert_large_slamb.py. Training is for accelerators, and has not
been tried.

One replica sends 2,530,027,584 bytes a step on average, 9.1 times fewer than dense float32.
"""

import dataclasses

from configs.shapes import bert_large_slamb
from train.config import Config


def get_config() -> Config:
    """The run of BERT-Large with another size."""
    large = bert_large_slamb.get_config()
    model = dataclasses.replace(large.model, layers=36, width=2560, heads=40)
    return dataclasses.replace(large, name="bert_xl_slamb", model=model)
