"""What benchmarks.slow_network compares: methods and models by name."""

import re
from typing import Any, NamedTuple

MEAN = "chain(compressed_mean({}, axis_name), {})"
ADAM, SGD = "adam(learning_rate)", "sgd(learning_rate, momentum=0.9)"
DENSE, LAMB = "dense float32", "LAMB"
EXACT_IN_DION = "by_path(('embed|position', True), ('kernel', False), ('.*', True))"

METHODS = {
    # name: optimizer.update of a config
    DENSE: MEAN.format("identity()", ADAM),
    "dense bfloat16": MEAN.format("cast('bfloat16')", ADAM),
    "8 bits": MEAN.format("quantize(8)", ADAM),
    "4 bits": MEAN.format("quantize(4)", ADAM),
    "1 bit": MEAN.format("sign(block=128)", SGD),
    "random 1/10": MEAN.format("random_k(0.1)", SGD),
    "largest of 8": MEAN.format("group_top_1(8)", SGD),
    "largest of 64, 4 bits": MEAN.format("compose(group_top_1(64), quantize(4))", SGD),
    "1-bit Adam": "one_bit_adam(learning_rate, axis_name, freeze_step=2)",
    "0/1 Adam, every 4th": "zero_one_adam(learning_rate, axis_name, variance_at=schedules.until(2),"
    " sync_at=schedules.halving(exponential_decay(1.0, 1, 0.5), 999, longest=4, after=2))",
    "CocktailSGD": f"cocktail_sgd({ADAM}, axis_name)",
    "CocktailSGD, signs of an eighth": f"cocktail_sgd({ADAM}, axis_name, "
    "compressor=compose(random_k(0.125), sign(block=1024)))",
    **{
        f"CocktailSGD{name}, 10x": f"cocktail_sgd({ADAM}, axis_name, "
        f"compressor=cocktail(random=0.5, top=0.5){more})"
        for name, more in {"": "", ", no delay": ", delayed=False"}.items()
    },
    # As many bytes as "8 bits", but they may be sent while the gradient is computed.
    "CocktailSGD, 8 bits": f"cocktail_sgd({ADAM}, axis_name, compressor=quantize(8))",
    "CocktailSGD, 8 bits, overlapped": f"cocktail_sgd({ADAM}, axis_name, compressor=quantize(8))",
    "sharded Adam, 4 bits": f"sharded_optimizer({ADAM}, axis_name)",
    **{
        f"PowerSGD {rank}": f"chain(power_sgd({rank}, axis_name, warmup_steps=2), {SGD})"
        for rank in (1, 4)
    },
    **{
        f"PowerSGD {rank}{name}, Adam": f"chain(power_sgd({rank}, axis_name, "
        f"warmup_steps=2{more}), {ADAM})"
        for rank in (1, 4)
        for name, more in {"": "", ", both sides": ", sides='both'"}.items()
    },
    "DiLoCo, 4 bits, every 4th": f"diloco({ADAM}, axis_name, every=4, code=quantize(4))",
    "DiLoCo, 4 bits, every 32nd": f"diloco({ADAM}, axis_name, every=32, code=quantize(4))",
    "SparseLoCo, every 4th": f"sparse_loco({ADAM}, axis_name, every=4)",
    "SparseLoCo, every 16th": f"sparse_loco({ADAM}, axis_name, every=16)",
    "DeMo": "demo(learning_rate, axis_name)",
    "Dion": f"dion(learning_rate, axis_name, rank=24, others={ADAM}, exact={EXACT_IN_DION})",
    LAMB: MEAN.format("identity()", "lamb(learning_rate)"),
    "SLAMB": "slamb(learning_rate, axis_name, density=0.1, sync_every=8)",
    "SLAMB, 8 bits": "slamb(learning_rate, axis_name, sync_every=8, "
    "compressor=compose(random_k(0.1), quantize(8)))",
    "1-bit LAMB": "one_bit_lamb(learning_rate, axis_name, freeze_step=2)",
}
SHARDED = {
    # name: qsdp of a config, in front of Adam
    "shards float32": "qsdp(axis_name, identity(), identity())",
    "shards bfloat16": "qsdp(axis_name, cast('bfloat16'), cast('bfloat16'))",
    "QSDP W8G8": "qsdp(axis_name)",
    "QSDP W8G8, gathered once": "qsdp(axis_name, gather_once=True)",
    "QSDP W4G4": "qsdp(axis_name, quantize(4, block=1024, range='minmax'), "
    "quantize(4, block=1024, range='minmax', rounding='stochastic'))",
}
ALONE = "no exchange"


class Peer(NamedTuple):
    """A PyTorch row: a file of benchmarks/peers, and the arguments of its `make`."""

    peer: str
    options: dict[str, Any]
    uneven: bool = False  # whether steps differ by design; then their mean counts


PEERS = {
    "PyTorch, no exchange": Peer("ddp", {"exchange": "none"}),
    "PyTorch DDP float32": Peer("ddp", {"exchange": "float32"}),
    "PyTorch DDP bfloat16": Peer("ddp", {"exchange": "bfloat16"}),
    **{f"PyTorch PowerSGD {rank}": Peer("power_sgd", {"rank": rank}) for rank in (1, 4)},
    "DeepSpeed 1-bit Adam": Peer("one_bit", {"optimizer": "one_bit_adam"}),
    "DeepSpeed 1-bit Adam, one tensor": Peer(
        "one_bit", {"optimizer": "one_bit_adam", "flat": True}
    ),
    "DeepSpeed 0/1 Adam, every 4th": Peer("one_bit", {"optimizer": "zero_one_adam"}, uneven=True),
    "CocktailSGD's code": Peer("cocktail_sgd", {"random": 0.1, "top": 0.2, "bits": 4}),
    "DeMo's code": Peer("demo", {"compression_topk": 32}),
    "Dion's code": Peer("dion", {"rank_fraction": 1 / 16}),
    "SLAMB's code": Peer("slamb", {"compress_ratio": 0.1, "local_steps": 8}, uneven=True),
}
AUTHORS = ("cocktail_sgd", "demo", "dion", "slamb")
"""Peers that need the folder of the authors' code."""
MODELS = {
    # name: fields of DecoderConfig
    "0.5M": {"layers": 2, "width": 128, "heads": 4, "context": 64},
    "5M": {"layers": 6, "width": 256, "heads": 4, "context": 128},
    "14M": {"layers": 8, "width": 384, "heads": 6, "context": 128},
}


def period_of(method: str) -> int:
    """The period of a method's steps; a multiple of it is timed."""
    every = re.search(r"every (\d+)", method)
    return int(every[1]) if every else 8 if method.startswith("SLAMB") else 1
