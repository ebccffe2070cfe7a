"""GPT-125M with QSDP, as trained by its authors: 12 layers, width 768, context 2,048, 32 devices.

    python -m train configs/shapes/gpt_125m_qsdp.py --report    # trains nothing

Their recipe: 256 sequences a step in four microbatches, 4,800 steps, AdamW without decay, weights
and gradients in 8 bits, min-max blocks of 1,024. What differs: bytes as tokens of the text that
`--data` names, where they had GPT-2's of C4; the vocabulary is kept for its size. Blocks are under
one scan, which compiles as fast as one of them. Training is for accelerators, and has not been
tried.

One replica sends 1,192,157,840 bytes a step, 4.9 times fewer than by float32; 244,278,032 where the
microbatches share one gather and one scatter, `--qsdp "qsdp(axis_name, gather_once=True)"`.
"""

from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config() -> Config:
    """The run; the configs of larger models replace its size, rate, steps and batch."""
    return Config(
        name="gpt_125m_qsdp",
        steps=4_800,
        replicas=32,
        accumulate=4,
        optimizer=Optimizer(
            update="chain(clip_by_global_norm(1.0), "
            "adamw(learning_rate, b2=0.95, weight_decay=0.0))",
            learning_rate=6e-4,
            warmup_steps=100,
        ),
        qsdp="qsdp(axis_name)",
        model=DecoderConfig(
            layers=12,
            width=768,
            heads=12,
            context=2048,
            vocab=50_257,
            dtype="bfloat16",
            scan=True,
        ),
        data=Data(batch=256),
    )
