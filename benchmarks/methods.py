"""The one table of methods by name, as a config describes them.

Rows of a suite may have shorter names: `worker.METHODS`, `scale_sizes.METHODS` and
`accelerators_step.METHODS` say which methods of this table they are.
"""

from typing import NamedTuple

from configs import (
    nano_4bit,
    nano_8bit,
    nano_dense,
    nano_one_bit_adam,
    nano_qsdp_hybrid,
    nano_zero_one_adam,
)

ADAM_RATES, SGD_RATES = (3e-3, 6e-3), (0.03, 0.1)

# 0/1 Adam's interval between rounds after the warm-up, and kappa of its variance.
INTERVALS = (*((h, 16) for h in (1, 4, 16, 64)), *((4, k) for k in (1, 4, 64)))

ADAM, MUON = "adam(learning_rate)", "optax.contrib.muon(learning_rate)"
MUON_RARE_ROWS = f"muon(learning_rate, others=rare_rows({ADAM}, axis_name))"
SGD = "sgd(learning_rate, momentum=0.9)"

EQUAL_WEIGHTS = "deviations=Deviations(fresh_variance=False, weigh_steps=False)"
HALVING = "halving(learning_rate, steps, after=warmup_steps)"


class Method(NamedTuple):
    """One row of a table, at each of its learning rates."""

    update: str  # `optimizer.update` of a config
    rates: tuple[float, ...] = ADAM_RATES
    schedule: str = "cosine"  # `optimizer.schedule` of a config
    qsdp: str | None = None  # `qsdp` of a config
    replicas: int | None = None  # instead of the task's
    fast: int = 1  # `fast` of a config
    layered: bool = False  # `per_layer` of a config, for methods that look at layers


def _of(config) -> Method:
    run = config.get_config()
    return Method(run.optimizer.update, qsdp=run.qsdp, fast=run.fast)


def _mean(compressor: str, optimizer: str = ADAM, rates=ADAM_RATES) -> Method:
    return Method(f"chain(compressed_mean({compressor}, axis_name), {optimizer})", rates)


def _momentum(compressor: str) -> Method:
    return _mean(compressor, SGD, SGD_RATES)


def _cocktail(arguments: str) -> Method:
    return Method(f"cocktail_sgd(adam(learning_rate), axis_name, {arguments})")


def _zero_one(more: str = "") -> Method:
    return Method(f"zero_one_adam(learning_rate, axis_name, sync_at=schedules.{HALVING}{more})")


def _every(interval: int, kappa: int) -> Method:
    """Beyond the paper, whose interval is 1 until the rate has halved: one after the warm-up."""
    meet = f"schedules.every({interval}, steps, after=warmup_steps)"
    learn = f"schedules.both({meet}, schedules.growing({kappa}))"
    return Method(f"zero_one_adam(learning_rate, axis_name, sync_at={meet}, variance_at={learn})")


def _frozen(more: str) -> Method:
    return Method(
        f"zero_one_adam(learning_rate, axis_name, sync_at=schedules.{HALVING}, "
        f"variance_at=schedules.growing(until=warmup_steps), {more})"
    )


# Codes of so many bits and a rounding, at the bytes of the first but for smaller blocks.
UNIFORM = "quantize({}, block=1024, range='minmax', rounding='{}')"
FEW_BITS = {
    "learned": "learned_levels({}, rounding='{}')",
    "rotated": f"rotated({UNIFORM})",
    "rotated, learned": "rotated(learned_levels({}, rounding='{}'))",
    "blocks of 32": "quantize({}, block=32, rounding='{}')",
    "rotated, blocks of 32": "rotated(quantize({}, block=32, rounding='{}'))",
    "rotated, learned, blocks of 128": "rotated(learned_levels({}, block=128, rounding='{}'))",
}


# What suffers most from few bits keeps eight: embedding, tied head and positions.
WIDE = "by_path(('embed|position|head', {}), ('.*', {}))"


def _qsdp(
    weights: int,
    gradients: int,
    few: str = UNIFORM,
    replicas: int | None = None,
    policies: tuple[str, str] = ("{1}", "{1}"),
) -> Method:
    """`few` is the code of fewer than eight bits; policies of weights and gradients join both."""

    def code(bits, rounding):
        return (few if bits < 8 else UNIFORM).format(bits, rounding)

    ways = zip(policies, (weights, gradients), ("nearest", "stochastic"), strict=True)
    codes = [policy.format(code(8, how), code(bits, how)) for policy, bits, how in ways]
    qsdp = f"qsdp(axis_name, {', '.join(codes)})"
    return Method("adam(learning_rate)", qsdp=qsdp, replicas=replicas)


# QSDP's bits of weights and gradients; its paper learns levels where there are fewer than eight.
BITS = ((8, 8), (6, 8), (5, 8), (4, 8), (3, 8), (8, 6), (8, 4), (4, 4))


def _sharded(gradients: str, differences: str) -> Method:
    codes = f"gradients={gradients}, differences={differences}"
    return Method(f"sharded_optimizer(adam(learning_rate), axis_name, {codes})")


# Codes of gradients, unbiased, and of differences of weights, of as many bits.
NOISY = {b: f"quantize({b}, rounding='stochastic')" for b in (8, 4, 2)}
ROUNDED = {8: "quantize(8)", 4: "quantize(4)", 2: "quantize(2)", 1: "sign(block=128)"}

LAMB_RATES = (1e-2, 2e-2, 4e-2)


def _slamb(arguments: str, sync_every: int = 25) -> Method:
    return Method(
        f"slamb(learning_rate, axis_name, sync_every={sync_every}, {arguments})", LAMB_RATES
    )


# CocktailSGD's exchange at growing compression. The factors are those of the codes against
# float16, without float32 leaves.
FACTORS = {
    "4x": "quantize(4)",
    "10x": "cocktail(random=0.5, top=0.5)",  # the authors' for pre-training
    "32x": "cocktail(random=0.25, top=0.25)",
    "140x": "cocktail(random=0.0625)",
    "281x": "cocktail(random=0.03125)",
    "561x": "cocktail(random=0.015625)",
}

# CocktailSGD's exchange by each of its stages alone, at about the bytes of all three.
STAGES = {
    "random only": "compressor=random_k(0.00625)",
    "top-K only": "compressor=top_k(0.00390625, block=4096)",
    # One bit is the least that a code of every value takes: a sixth of the exchanges.
    "quantization only": "compressor=sign(block=1024), sync_every=6",
    "groups of 64": "compressor=compose(group_top_1(64), quantize(4))",
    "1/10, groups of 4": "compressor=compose(random_k(0.1), group_top_1(4), quantize(4))",
    "1 bit of the largest of 64": "compressor=compose(group_top_1(64), sign(block=128))",
    "1 bit of 1/8": "compressor=compose(random_k(0.125), sign(block=1024))",
    "1 bit of 1/16": "compressor=compose(random_k(0.0625), sign(block=1024))",
    # What of the last one's loss is the mask's, and what the code's, at more bytes.
    "random 1/8": "compressor=random_k(0.125)",
    "1 bit": "compressor=sign(block=1024)",
    # All values now and then, after local steps.
    "4 bits, every 32nd": "compressor=quantize(4), sync_every=32",
    "4 bits, every 8th": "compressor=quantize(4), sync_every=8",
}

# Local steps, low rank and DCT momentum. Rates, and those of outer steps, are pico's: the best of a
# few on seed 0, in runs of 2,000 steps, and of 8,000 for every 106th step.

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
    return Method(f"local_steps({MUON}, axis_name, {code}, {steps})", (rate,))


def _sparse(inner: str, rate: float) -> Method:
    return Method(f"sparse_loco({inner}, axis_name, every=16)", (rate,))


def _groups(inner: str, rate: float) -> Method:
    outer = "outer=sgd(1.0), error_decay=0.95"
    update = f"local_steps({inner}, axis_name, every=16, code=gathered({_GROUPS}), {outer})"
    return Method(update, (rate,))


PICO: dict[str, Method] = {
    "dense Muon": _mean("identity()", MUON, (1e-2,)),
    "dense Lion": _mean("identity()", "lion(learning_rate)", (1e-3,)),
    "DiLoCo, Muon, 4 bits": _diloco(MUON, 1e-2, 16, 0.6, 0.6),
    "DiLoCo, Muon, 4 bits, every 32nd": _diloco(MUON, 1e-2, 32, 0.6, 0.6),
    "DiLoCo, Muon, 4 bits, 32 by rate": _diloco(MUON, 1e-2, _BY_RATE, 1.0, 0.3),
    "DiLoCo, Muon, 2 bits": _two_bits(1e-2, 16, 0.6, 0.6, 0.9),
    "DiLoCo, Muon, 2 bits, every 106th": _two_bits(6e-3, 106, 0.8, 0.5, 1.0),
    "MuLoCo": Method("muloco(learning_rate, axis_name)", (8e-3,)),  # not measured on pico
    "DiLoCo, 4 bits": _diloco(ADAM, 3e-3, 16, 0.7, 0.8),
    "DiLoCo, 4 bits, every 32nd": _diloco(ADAM, 3e-3, 32, 0.7, 0.8),
    "SparseLoCo": _sparse(ADAM, 6e-3),
    "SparseLoCo, Muon": _sparse(MUON, 1e-2),
    "groups of 64, 2 bits": _groups(ADAM, 6e-3),
    "groups of 64, 2 bits, Muon": _groups(MUON, 1e-2),
    "PowerSGD": Method(f"chain(power_sgd(4, axis_name), {SGD})", (0.1,)),
    "PowerSGD, Adam": Method(f"chain(power_sgd(4, axis_name), {ADAM})", (1e-2,)),
    "Dion": Method(f"dion(learning_rate, axis_name, rank=16, others={ADAM})", (2e-2,)),
    "DeMo": Method("demo(learning_rate, axis_name)", (4e-3,)),
    # Not measured on pico, whose vocabulary is small.
    "DeMo, 4 bits": Method("demo(learning_rate, axis_name, values=quantize(4))", (4e-3,)),
    "DeMo, 4 bits, owners": Method(
        "demo(learning_rate, axis_name, top=64, values=quantize(4), mean=two_shot)", (4e-3,)
    ),
    "DeMo, embedding 10x": Method(
        "by_kind(demo(learning_rate, axis_name), embedding=chain("
        f"compressed_mean(cocktail(random=0.5, top=0.5), axis_name), {ADAM}))",
        (4e-3,),
    ),
    # Rows of embeddings step as far as in dense Adam. Signs of a sixth have nearly the bits of 88x.
    **{
        f"CocktailSGD, no delay, {factor}, {name}": Method(
            f"cocktail_sgd({inner}, axis_name, delayed=False{code})", (rate,)
        )
        for name, inner, rate in (
            ("rare rows", f"rare_rows({ADAM}, axis_name)", 6e-3),
            ("Muon", MUON_RARE_ROWS, 8e-3),
        )
        for factor, code in (
            ("88x", ""),
            ("10x", ", compressor=cocktail(random=0.5, top=0.5)"),
            ("1 bit of 1/6", ", compressor=compose(random_k(1/6), sign(block=1024))"),
        )
    },
    **{
        f"DiLoCo, 4 bits, rare rows{name}": _diloco(
            f"rare_rows({ADAM}, axis_name)", 3e-3, every, outer, momentum
        )
        for name, every, outer, momentum in (
            ("", 16, 0.7, 0.8),
            (", every 4th", 4, 0.7, 0.8),
            (", outer 1.0", 16, 1.0, 0.0),
        )
    },
    "MuLoCo, mean momenta": Method(
        "muloco(learning_rate, axis_name, outer_rate=1.0, outer_momentum=0.0, "
        "momentum_code=quantize(3, block=64))",
        (8e-3,),
    ),
    "MuLoCo, every 4th": Method("muloco(learning_rate, axis_name, every=4)", (8e-3,)),
}

# Steps that are timed, not whole runs, have warm-ups of two steps and short intervals.
_EXACT_IN_DION = "by_path(('embed|position', True), ('kernel', False), ('.*', True))"
TIMED: dict[str, Method] = {
    "dense Adam, sent in bfloat16": _mean("cast('bfloat16')"),
    "random momentum SGD": _momentum("random_k(0.1)"),
    "groups of 64, 4 bits, momentum SGD": _momentum("compose(group_top_1(64), quantize(4))"),
    "0/1 Adam, every 4th": Method(
        "zero_one_adam(learning_rate, axis_name, variance_at=schedules.until(2), sync_at="
        "schedules.halving(exponential_decay(1.0, 1, 0.5), 999, longest=4, after=2))"
    ),
    "CocktailSGD, 8 bits": _cocktail("compressor=quantize(8)"),
    **{
        f"PowerSGD {rank}{name}, two dense steps": Method(
            f"chain(power_sgd({rank}, axis_name, warmup_steps=2{more}), {optimizer})"
        )
        for rank in (1, 4)
        for name, more, optimizer in (
            ("", "", SGD),
            (", Adam", "", ADAM),
            (", both sides, Adam", ", sides='both'", ADAM),
        )
    },
    **{
        f"DiLoCo, 4 bits, every {place}, plain": Method(
            f"diloco({ADAM}, axis_name, every={every}, code=quantize(4))"
        )
        for place, every in {"4th": 4, "32nd": 32}.items()
    },
    "SparseLoCo, every 4th": Method(f"sparse_loco({ADAM}, axis_name, every=4)"),
    "Dion, rank 24": Method(
        f"dion(learning_rate, axis_name, rank=24, others={ADAM}, exact={_EXACT_IN_DION})"
    ),
    "sharded Adam": Method(f"sharded_optimizer({ADAM}, axis_name)"),
    "SLAMB, every 8": _slamb("density=0.1", 8),
    "SLAMB, every 8, 8 bits": _slamb("compressor=compose(random_k(0.1), quantize(8))", 8),
    **{
        f"shards, {name}": Method(ADAM, qsdp=f"qsdp(axis_name{more})")
        for name, more in {
            "float32": ", identity(), identity()",
            "bfloat16": ", cast('bfloat16'), cast('bfloat16')",
            "8 bits": "",
            "8 bits, gathered once": ", gather_once=True",
        }.items()
    },
}

# Steps that are compiled for accelerators have decay, as large models do.
_ADAMW = "adamw(learning_rate)"
COMPILED: dict[str, Method] = {
    "dense AdamW": _mean("identity()", _ADAMW),
    "8-bit AdamW": _mean("quantize(8)", _ADAMW),
    "4-bit AdamW": _mean("quantize(4)", _ADAMW),
    **{
        f"{name} AdamW, order of the tree": _mean(f"two_shot({code}, order=None)", _ADAMW)
        for name, code in {"dense": "identity()", "4-bit": "quantize(4)"}.items()
    },
    "CocktailSGD, AdamW": Method(f"cocktail_sgd({_ADAMW}, axis_name)"),
    # Float32 moments of 20 B parameters do not fit into memory.
    "CocktailSGD, AdamW, narrow momentum": Method(
        "cocktail_sgd(adamw(learning_rate, mu_dtype='bfloat16'), axis_name)"
    ),
    "local steps, AdamW": Method(f"local_steps({_ADAMW}, axis_name, every=16)"),
    # The rows were measured with all matrices as factors, those of tokens and positions, too.
    "Dion, rank 64": Method(
        "dion(learning_rate, axis_name, rank=64, "
        "exact=by_path(('bias|scale', True), ('.*', False)))"
    ),
    "0/1 Adam, plain": Method("zero_one_adam(learning_rate, axis_name)"),
    "SLAMB, plain": Method("slamb(learning_rate, axis_name)"),
    "SLAMB, plain, mean variance": Method("slamb(learning_rate, axis_name, variance='mean')"),
    "sharded AdamW": Method(f"sharded_optimizer({_ADAMW}, axis_name)"),
    "QSDP W8G8, fast axis": Method(_ADAMW, qsdp="qsdp(axis_name, fast_axis=fast_axis)"),
}


METHODS: dict[str, Method] = {
    "dense Adam": _of(nano_dense)._replace(rates=(*ADAM_RATES, 1.2e-2)),
    "8-bit Adam": _of(nano_8bit),
    "4-bit Adam": _mean("quantize(4)"),
    "4-bit Adam, blocks of 32": _of(nano_4bit),
    "sign Adam": _mean("sign(block=128)"),
    "sign Adam, rotated": _mean("rotated(sign(block=128))"),
    "group_top_1 Adam": _mean("group_top_1(8)"),
    "top_k Adam": _mean("top_k(0.125, block=4096)"),
    "dense momentum SGD": _momentum("identity()"),
    "sign momentum SGD": _momentum("sign(block=128)"),
    "group_top_1 momentum SGD": _momentum("group_top_1(8)"),
    "top_k momentum SGD": _momentum("top_k(0.125, block=4096)"),
    "1-bit Adam": _of(nano_one_bit_adam),
    # Two and a hundred are of steps that are timed; a quarter of the steps, 750, is the longest
    # warm-up that the paper speaks of.
    **{
        f"1-bit Adam, {n} dense steps": Method(
            f"one_bit_adam(learning_rate, axis_name, freeze_step={n})"
        )
        for n in (2, 100, 250, 750, 1200)
    },
    "0/1 Adam": _zero_one(),
    # The paper's weights of the variance, and its policy, that freezes it after the warm-up.
    "0/1 Adam, stale variance": _zero_one(", deviations=Deviations(fresh_variance=False)"),
    "0/1 Adam, equal weights": _zero_one(f", {EQUAL_WEIGHTS}"),
    "0/1 Adam, equal weights, frozen": _frozen(EQUAL_WEIGHTS),
    # Buffers of 8 bits in the warm-up.
    "0/1 Adam, warm-up": _zero_one(", warmup_steps=warmup_steps"),
    "0/1 Adam, warm-up, variances of 8 bits": _of(nano_zero_one_adam),
    # Two and a half times the variances, of 8 bits, by two thirds of their bytes; and still more.
    **{
        f"0/1 Adam, warm-up, kappa {name}": _zero_one(
            ", warmup_steps=warmup_steps, variance_compressor=quantize(8), "
            f"variance_at=schedules.both(schedules.growing({kappa}), schedules.{HALVING}){more}"
        )
        for name, kappa, more in (
            ("64", 64, ""),
            ("64, 4 bits", 64, ", compressor=quantize(4)"),
            ("256", 256, ""),
        )
    },
    # The same in every step: one bit, but no rounds are left out.
    "0/1 Adam, warm-up, kappa 64, H 1": Method(
        "zero_one_adam(learning_rate, axis_name, warmup_steps=warmup_steps, "
        "variance_compressor=quantize(8), variance_at=schedules.growing(64))"
    ),
    "0/1 Adam, kappa 64, 8 bits, stale variance": Method(
        f"zero_one_adam(learning_rate, axis_name, sync_at=schedules.{HALVING}, "
        f"variance_at=schedules.both(schedules.{HALVING}, schedules.growing(64)), "
        "variance_compressor=quantize(8), deviations=Deviations(fresh_variance=False))"
    ),
    # A third of the rounds, and variances from a few gradients of 8 bits.
    **{
        f"0/1 Adam, few rounds{name}": Method(
            "zero_one_adam(learning_rate, axis_name, "
            "sync_at=schedules.every(4, steps, after=warmup_steps), "
            f"variance_at=schedules.growing(4), variance_compressor=quantize(8){more})"
        )
        for name, more in {
            "": "",
            ", stale variance": ", deviations=Deviations(fresh_variance=False)",
        }.items()
    },
    **{f"0/1 Adam, H {h}, kappa {k}": _every(h, k) for h, k in INTERVALS},
    # What of the state, and of a message, may have fewer bits.
    **{
        f"0/1 Adam, residual in {bits} bits": Method(f"compact({_zero_one().update}, {bits})")
        for bits in (8, 16)
    },
    **{
        f"0/1 Adam, a scale a {name}": _zero_one(f", compressor=sign(block={block})")
        for name, block in {"bucket": None, "row of 128": 128}.items()
    },
    "0/1 Adam, as in the paper": _frozen("deviations=None"),
    "CocktailSGD": _cocktail("warmup_steps=0"),
    "CocktailSGD, warm-up": _cocktail("warmup_steps=warmup_steps"),
    "CocktailSGD, no compression": _cocktail("compressor=identity()"),
    **{f"CocktailSGD, {x}": _cocktail(f"compressor={code}") for x, code in FACTORS.items()},
    **{f"CocktailSGD, {name}": _cocktail(arguments) for name, arguments in STAGES.items()},
    # Replicas learn of each other's work in the same step; nothing overlaps.
    **{
        f"CocktailSGD, no delay, {name}": _cocktail(f"compressor={code}, delayed=False")
        for name, code in {
            "no compression": "identity()",
            **FACTORS,
            "88x": "cocktail()",
            "1 bit": "sign(block=1024)",
            "1 bit of 1/8": "compose(random_k(0.125), sign(block=1024))",
        }.items()
    },
    **{f"QSDP W{w}G{g}": _qsdp(w, g) for w, g in BITS},
    **{
        f"QSDP W{w}G{g}, {name}": _qsdp(w, g, code)
        for name, code in FEW_BITS.items()
        for w, g in BITS[1:]
    },
    **{
        f"QSDP W{w}G{g}, learned, embedding 8": _qsdp(
            w, g, FEW_BITS["learned"], policies=(WIDE, WIDE)
        )
        for w, g in ((w, g) for w in (6, 5, 4, 3) for g in (8, 4))
    },
    "QSDP W4G4, learned, embedding's weights 8": _qsdp(
        4, 4, FEW_BITS["learned"], policies=(WIDE, "{1}")
    ),
    "QSDP W8G8, 8 shards": _qsdp(8, 8, replicas=8),
    "QSDP W4G4, 8 shards": _qsdp(4, 4, replicas=8),
    "QSDP W4G4, learned, 8 shards": _qsdp(4, 4, FEW_BITS["learned"], replicas=8),
    "QSDP W8G8, hybrid": _of(nano_qsdp_hybrid),
    **{f"sharded Adam, G{g}D{d}": _sharded(NOISY[g], ROUNDED[d]) for g in NOISY for d in ROUNDED},
    "sharded Adam, G4D4, blocks of 32": _sharded(
        "quantize(4, block=32, rounding='stochastic')", "quantize(4, block=32)"
    ),
    "LAMB": _mean("identity()", "lamb(learning_rate)", LAMB_RATES),
    "4-bit LAMB": _mean("quantize(4)", "lamb(learning_rate)", LAMB_RATES),
    "SLAMB": _slamb("density=0.1"),
    "SLAMB, mean variance": _slamb("density=0.1, variance='mean'"),
    "SLAMB, mean variance, 8 bits": _slamb(
        "variance='mean', compressor=compose(random_k(0.25), quantize(8)), "
        "drift_compressor=quantize(8)",
        sync_every=5,
    ),
    "SLAMB, mean variance, 4 bits": _slamb(
        "variance='mean', compressor=compose(random_k(0.25), quantize(4)), "
        "drift_compressor=quantize(4)",
        sync_every=5,
    ),
    "SLAMB, 8 bits": _slamb("compressor=compose(random_k(0.1), quantize(8))"),
    "LAMB in CocktailSGD, no delay, 10x": Method(
        "cocktail_sgd(lamb(learning_rate), axis_name, delayed=False, "
        "compressor=cocktail(random=0.5, top=0.5))",
        LAMB_RATES,
    ),
    # Fewer bits a value, and more values, by fewer bytes than a tenth in float32.
    "SLAMB, 8 bits, density 0.25": _slamb("compressor=compose(random_k(0.25), quantize(8))"),
    "SLAMB, 4 bits, density 0.5": _slamb("compressor=compose(random_k(0.5), quantize(4))"),
    "SLAMB, 8 bits, drifts too": _slamb(
        "compressor=compose(random_k(0.1), quantize(8)), drift_compressor=quantize(8)"
    ),
    "SLAMB, linear": _slamb("density=0.1, rescaling=Rescaling('linear')"),
    "SLAMB, no rescaling": _slamb("density=0.1, rescaling=Rescaling(b3=1.0)"),
    "SLAMB, masked": _slamb("density=0.1, rescaling=Rescaling('masked')"),
    # One quantity after the other, from "SLAMB": b3=0.99, sync_every=25, density=0.1.
    **{
        f"SLAMB, b3 {b3}": _slamb(f"density=0.1, rescaling=Rescaling(b3={b3})")
        for b3 in (0.9, 0.999)
    },
    **{f"SLAMB, every {h}": _slamb("density=0.1", h) for h in (5, 100)},
    **{f"SLAMB, density {d}": _slamb(f"density={d}") for d in (0.01, 0.05, 0.25)},
    # A sixth of the steps of the tasks; two and a hundred of steps that are timed.
    **{
        f"1-bit LAMB, {n} dense steps": Method(
            f"one_bit_lamb(learning_rate, axis_name, freeze_step={n})", LAMB_RATES
        )
        for n in (2, 20, 66, 100, 166, 500, 1167)
    },
    **PICO,
    **TIMED,
    **COMPILED,
}
