"""GPT-NeoX-20B by CocktailSGD, whose authors fine-tuned it: 44 layers, width 6,144, 64 heads.

    python -m train configs/shapes/gpt_neox_20b_cocktail.py --report    # trains nothing

The recipe of configs/shapes/opt_1_3b_cocktail.py. What differs from GPT-NeoX: learned positions in
place of rotary ones, attention before the perceptron and not beside it, tied embeddings, bytes as
tokens. Each replica is one device here, which no device of today can hold: for bytes and messages.
With the parameters in shards over the eight H100 of a host, `jaxcomp.train_step(...,
param_specs=...)`, the compiled step needs 70 GB of a device: docs/accelerators.md. Training has not
been tried.

One replica sends 698,075,712 bytes a step, 87 times fewer than a dense float16 all-reduce.
"""

import dataclasses

from configs.shapes import opt_1_3b_cocktail
from train.config import Config


def get_config() -> Config:
    """The run of OPT-1.3B with another size."""
    opt = opt_1_3b_cocktail.get_config()
    model = dataclasses.replace(opt.model, layers=44, width=6144, heads=64, vocab=50_432)
    return dataclasses.replace(opt, name="gpt_neox_20b_cocktail", model=model)
