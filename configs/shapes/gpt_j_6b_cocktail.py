"""GPT-J-6B by CocktailSGD, whose authors fine-tuned it: 28 layers, width 4,096, 16 heads.

    python -m train configs/shapes/gpt_j_6b_cocktail.py --report    # trains nothing

The recipe of configs/shapes/opt_1_3b_cocktail.py. What differs from GPT-J: learned positions in
place of rotary ones, attention before the perceptron and not beside it, tied embeddings, biases in
attention, bytes as tokens. Training is for accelerators, and has not been tried.

One replica sends 201,713,568 bytes a step, 87 times fewer than a dense float16 all-reduce.
"""

import dataclasses

from configs.shapes import opt_1_3b_cocktail
from train.config import Config


def get_config() -> Config:
    """The run of OPT-1.3B with another size."""
    opt = opt_1_3b_cocktail.get_config()
    model = dataclasses.replace(opt.model, layers=28, width=4096, heads=16, vocab=50_400)
    return dataclasses.replace(opt, name="gpt_j_6b_cocktail", model=model)
