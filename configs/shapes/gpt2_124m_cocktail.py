"""GPT-2 of 124 M parameters with CocktailSGD: 12 layers, width 768, context 1,024, bytes as tokens.

    python -m train configs/shapes/gpt2_124m_cocktail.py --report    # trains nothing

GPT-2's vocabulary of 50,257 is kept for its size; the text uses 256 of it. After 2,000 dense steps
one replica sends 5,003,488 bytes a step, 174 times fewer than dense float32. The report compiles
for minutes on two cores; training is for accelerators, and has not been tried.
"""

from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run, on eight replicas."""
    return Config(
        name="gpt2_124m_cocktail",
        steps=20_000,
        replicas=8,
        optimizer=Optimizer(
            update="cocktail_sgd(chain(clip_by_global_norm(1.0), "
            "adamw(learning_rate, b2=0.95, weight_decay=0.1)), axis_name, "
            "warmup_steps=warmup_steps)",
            learning_rate=6e-4,
            warmup_steps=2_000,
        ),
        model=DecoderConfig(
            layers=12, width=768, heads=12, context=1024, vocab=50_257, dtype="bfloat16"
        ),
        data=Data(batch=64),
    )
