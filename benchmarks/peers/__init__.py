"""Training steps of other libraries in PyTorch, to compare with ours.

They run in a Python of their own, which imports nothing of jaxcomp, JAX or `train`:

    python -m venv PEERS
    PEERS/bin/pip install "torch>=2.13" numpy einops deepspeed==0.19.6

The authors' code of four methods is not packaged. It is read from one folder, and is not part of
this project:

    git clone https://github.com/bloc97/DeMo             # at 0e48145
    git clone https://github.com/microsoft/dion          # at 0a059a4
    git clone https://github.com/DS3Lab/CocktailSGD      # at 4819ed7
    git clone https://github.com/hangxu0304/SLAMB        # at 7388495

Each is a function `(module, job, **options) -> Step`, see `base`; `PEERS` lists them. This file
imports neither PyTorch nor JAX, for programs of both.
"""

from typing import Any, NamedTuple


class Peer(NamedTuple):
    """A PyTorch row: a file of benchmarks/peers with a function in it, and its arguments."""

    peer: str
    options: dict[str, Any]
    uneven: bool = False  # whether steps differ by design; then their mean counts


PEERS = {
    "PyTorch, no exchange": Peer("optimizers.ddp", {"exchange": "none"}),
    "PyTorch DDP float32": Peer("optimizers.ddp", {"exchange": "float32"}),
    "PyTorch DDP bfloat16": Peer("optimizers.ddp", {"exchange": "bfloat16"}),
    **{f"PyTorch PowerSGD {rank}": Peer("optimizers.power_sgd", {"rank": rank}) for rank in (1, 4)},
    "DeepSpeed 1-bit Adam": Peer("optimizers.one_bit", {"optimizer": "one_bit_adam"}),
    "DeepSpeed 1-bit Adam, one tensor": Peer(
        "optimizers.one_bit", {"optimizer": "one_bit_adam", "flat": True}
    ),
    "DeepSpeed 0/1 Adam, every 4th": Peer(
        "optimizers.one_bit", {"optimizer": "zero_one_adam"}, uneven=True
    ),
    "CocktailSGD's code": Peer("cocktail_sgd.make", {"random": 0.1, "top": 0.2, "bits": 4}),
    "DeMo's code": Peer("optimizers.demo", {"compression_topk": 32}),
    "Dion's code": Peer("optimizers.dion", {"rank_fraction": 1 / 16}),
    "SLAMB's code": Peer(
        "optimizers.slamb", {"compress_ratio": 0.1, "local_steps": 8}, uneven=True
    ),
}
AUTHORS = ("cocktail_sgd.make", "optimizers.demo", "optimizers.dion", "optimizers.slamb")
"""Peers that need the folder of the authors' code."""


def path_of(name: str) -> str:
    """The path in `Decoder` of a parameter: `block_0/qkv/kernel` of `blocks.0.qkv.weight`."""
    path = name.replace("blocks.", "block_").replace(".", "/")
    if "norm" in path:
        return path.replace("weight", "scale")
    return path.replace("weight", "embedding" if path.startswith("embed") else "kernel")
