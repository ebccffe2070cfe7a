"""BERT-Base with 0/1 Adam, as its authors trained it: 12 layers, width 768, sequences of 128.

    python -m train configs/shapes/bert_base_zero_one_adam.py --report    # trains nothing

The paper's plan: 118,000 steps of 4,096 sequences; the rate rises to 4e-4 in 12,500 steps and then
falls by 1% every 520. The variance is learned in the warm-up alone, at distances that double every
16 updates; intervals double as the rate halves, up to 16 steps. Decay and bias correction as in the
authors' configuration file; preconditioning and the fresh variance, its weights and floor are ours.

What differs from BERT: one segment, no next-sentence task, embeddings tied, pre-norm blocks as in
gpt.py; bytes as tokens, the vocabulary of 30,522 kept for its size. Eight replicas of 32
microbatches. Training is for accelerators, and has not been tried.

One replica sends 16,458,051 bytes a step on average, 46 times fewer than dense float32.
"""

from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run, on eight replicas."""
    return Config(
        name="bert_base_zero_one_adam",
        steps=118_000,
        replicas=8,
        accumulate=32,
        objective="masked",
        optimizer=Optimizer(
            update="zero_one_adam(learning_rate, axis_name, "
            "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
            "variance_at=schedules.growing(until=warmup_steps), "
            "deviations=Deviations(bias_correction=False), weight_decay=0.01)",
            learning_rate=4e-4,
            warmup_steps=12_500,
            schedule="exponential",
            final_fraction=0.13,  # 0.99^((118,000 - 12,500) / 520)
        ),
        model=DecoderConfig(
            layers=12, width=768, heads=12, context=128, vocab=30_522, dtype="bfloat16"
        ),
        data=Data(batch=4096),
    )
