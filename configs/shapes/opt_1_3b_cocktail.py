"""OPT-1.3B by CocktailSGD, whose authors fine-tuned it: 24 layers, width 2,048, context 2,048.

    python -m train configs/shapes/opt_1_3b_cocktail.py --report    # trains nothing

The authors' compressor and recipe of their scripts: 16 sequences a replica, a linear decay after
ten steps, no dense steps; here with blocks under one scan, since many layers compile slowly;
`per_layer=False`, since nothing here looks at a whole leaf. What differs from OPT: GELU in place of
ReLU, bytes as tokens; the vocabulary is kept for its size. Pretrained weights are not read. Each
replica holds the whole model and its moments. Training is for accelerators, and has not been tried.

One replica sends 45,341,664 bytes a step, 87 times fewer than a dense float16 all-reduce.
"""

from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run, on four replicas; the configs of larger models replace its `name` and `model`."""
    return Config(
        name="opt_1_3b_cocktail",
        steps=4_000,
        replicas=4,
        accumulate=16,
        per_layer=False,
        optimizer=Optimizer(
            update="cocktail_sgd(chain(clip_by_global_norm(1.0), "
            "adamw(learning_rate, weight_decay=0.01)), axis_name)",
            learning_rate=1e-5,
            warmup_steps=10,
            schedule="linear",
            final_fraction=0.0,
        ),
        model=DecoderConfig(
            layers=24,
            width=2048,
            heads=32,
            context=2048,
            vocab=50_272,
            dtype="bfloat16",
            scan=True,
        ),
        data=Data(batch=64),
    )
