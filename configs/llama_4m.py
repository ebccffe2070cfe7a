"""A Llama of 3.7 M parameters, trained from scratch on the source of Python's standard library.

    python -m train configs/llama_4m.py --data.tokenizer FOLDER

FOLDER has a tokenizer of 2,048 tokens: `python -m benchmarks.studies.fine_tune texts texts` makes
texts/tokenizer. `python -m train.export runs/llama_4m llama_4m` then writes a LlamaForCausalLM
with its tokenizer, which docs/fine_tune.md fine-tunes over slow networks. 13 minutes on one core of
an AMD EPYC; validation loss 3.314 nats a token after 4.1 M tokens (one seed, Python 3.11.7's
library).
"""

from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run, of one replica."""
    return Config(
        name="llama_4m",
        steps=4000,
        replicas=1,
        eval_every=500,
        eval_batches=32,
        optimizer=Optimizer(
            update="chain(compressed_mean(identity(), axis_name), clip_by_global_norm(1.0), "
            "adamw(learning_rate, b2=0.95, weight_decay=0.1))",
            learning_rate=3e-3,
            warmup_steps=200,
            final_fraction=0.05,
        ),
        model=DecoderConfig(
            layers=4,
            width=256,
            heads=4,
            context=128,
            vocab=2048,
            mlp=704,
            activation="silu",
            gated=True,
            norm="rms",
            rotary="halves",
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
        ),
        data=Data(batch=8),
    )
