"""OPT-1.3B with CocktailSGD, whose authors fine-tuned it: four hosts of eight devices.

    python -m train configs/shapes/opt_1_3b_cocktail.py --report    # trains nothing
    python -m train.launch --hosts hosts.txt -- configs/shapes/opt_1_3b_cocktail.py --start-from DIR

The authors' compressor and recipe of their scripts: 16 sequences a replica, a linear decay after
ten steps, no dense steps. The model's form is OPT's own. A host is a replica: parameters, Adam's
moments and residuals are sharded over its devices. `per_layer=False`, since nothing here looks at a
whole leaf. What a device holds: docs/fine_tune.md. Training has not been tried.
"""

from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run; the configs of larger models replace its `name` and `model`."""
    return Config(
        name="opt_1_3b_cocktail",
        steps=4_000,
        replicas=32,
        fast=8,
        in_shards=True,
        accumulate=2,
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
            mlp=8192,
            activation="relu",
            norm_eps=1e-5,
            first_position=2,
            dtype="bfloat16",
            scan=True,
            remat=True,
        ),
        data=Data(batch=64),
    )
