"""The nano task with sharded parameters: weights and gradients are sent at 4 bits.

    python -m train configs/nano_qsdp_4bit.py

As configs/nano_qsdp.py, with about half its bytes. The levels are learned, of each parameter's
weights and gradients; the embedding, which is also the output matrix, and positions keep 8 bits.
What was gathered is evaluated and exported.

Not trained on nano yet. On pico the same codes reach 1.341, without the 8 bits 1.366, dense Adam
1.318 (one seed; python -m benchmarks.scale --size pico).
"""

import dataclasses

from configs import nano_qsdp
from train.config import Config


def get_config() -> Config:
    """The run of eight bits, with other codes."""
    return dataclasses.replace(
        nano_qsdp.get_config(),
        name="nano_qsdp_4bit",
        qsdp=f"qsdp(axis_name, {_few('nearest')}, {_few('stochastic')})",
    )


def _few(rounding: str) -> str:
    """Four learned bits, and eight where few cost most."""
    wide = f"quantize(8, block=1024, range='minmax', rounding='{rounding}')"
    few = f"learned_levels(4, rounding='{rounding}')"
    return f"by_path(('embed|position|head', {wide}), ('.*', {few}))"
