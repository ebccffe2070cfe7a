"""Methods beyond the four systems, by name: local steps, low rank and DCT momentum.

Learning rates, and the rates of outer steps, are pico's: the best of a few on seed 0, in runs of
2,000 steps, and of 8,000 for every 106th step.
"""

from benchmarks.methods import Method

EVERY = 16  # inner steps per outer step

_ADAM, _MUON = "adam(learning_rate)", "optax.contrib.muon(learning_rate)"
# One value and its position of every 64 in 8 bits: an eighth of a bit per parameter and outer step.
_GROUPS = "compose(group_top_1(64), bin_means(2))"
# As many outer steps as with a fixed interval, closer together while the rate is high.
_BY_RATE = "schedules.by_rate(learning_rate, steps, 32)"


def _diloco(inner: str, rate: float, every: int | str, outer: float, momentum: float) -> Method:
    steps = f"outer_rate={outer}, outer_momentum={momentum}"
    update = f"diloco({inner}, axis_name, every={every}, code=quantize(4), {steps})"
    return Method(update, (rate,))


def _two_bits(rate: float, every: int, outer: float, momentum: float, decay: float) -> Method:
    """The parts of `muloco` with optax's Muon, which takes the embedding for a matrix, too."""
    steps = f"outer=sgd({outer}, {momentum}, nesterov=True), error_decay={decay}"
    code = f"every={every}, code=bin_means(2, block=1024)"
    return Method(f"local_steps({_MUON}, axis_name, {code}, {steps})", (rate,))


def _sparse(inner: str, rate: float) -> Method:
    return Method(f"sparse_loco({inner}, axis_name, every={EVERY})", (rate,))


def _groups(inner: str, rate: float) -> Method:
    outer = "outer=sgd(1.0), error_decay=0.95"
    update = f"local_steps({inner}, axis_name, every={EVERY}, code=gathered({_GROUPS}), {outer})"
    return Method(update, (rate,))


METHODS: dict[str, Method] = {
    "dense Muon": Method(f"chain(compressed_mean(identity(), axis_name), {_MUON})", (1e-2,)),
    "DiLoCo, Muon, 4 bits": _diloco(_MUON, 1e-2, EVERY, 0.6, 0.6),
    "DiLoCo, Muon, 4 bits, every 32nd": _diloco(_MUON, 1e-2, 32, 0.6, 0.6),
    "DiLoCo, Muon, 4 bits, 32 by rate": _diloco(_MUON, 1e-2, _BY_RATE, 1.0, 0.3),
    "DiLoCo, Muon, 2 bits": _two_bits(1e-2, EVERY, 0.6, 0.6, 0.9),
    "DiLoCo, Muon, 2 bits, every 106th": _two_bits(6e-3, 106, 0.8, 0.5, 1.0),
    "MuLoCo": Method("muloco(learning_rate, axis_name)", (8e-3,)),  # not measured on pico
    "DiLoCo, 4 bits": _diloco(_ADAM, 3e-3, EVERY, 0.7, 0.8),
    "DiLoCo, 4 bits, every 32nd": _diloco(_ADAM, 3e-3, 32, 0.7, 0.8),
    "SparseLoCo": _sparse(_ADAM, 6e-3),
    "SparseLoCo, Muon": _sparse(_MUON, 1e-2),
    "groups of 64, 2 bits": _groups(_ADAM, 6e-3),
    "groups of 64, 2 bits, Muon": _groups(_MUON, 1e-2),
    "PowerSGD": Method("chain(power_sgd(4, axis_name), sgd(learning_rate, momentum=0.9))", (0.1,)),
    "PowerSGD, Adam": Method(f"chain(power_sgd(4, axis_name), {_ADAM})", (1e-2,)),
    "Dion": Method(f"dion(learning_rate, axis_name, rank=16, others={_ADAM})", (2e-2,)),
    "DeMo": Method("demo(learning_rate, axis_name)", (4e-3,)),
}
