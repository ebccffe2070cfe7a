"""What the convergence benchmark compares: methods by name, as a config describes them."""

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

HALVING = "halving(learning_rate, steps, after=warmup_steps)"


class Method(NamedTuple):
    """One row of a table, at each of its learning rates."""

    update: str  # `optimizer.update` of a config
    rates: tuple[float, ...] = ADAM_RATES
    schedule: str = "cosine"  # `optimizer.schedule` of a config
    qsdp: str | None = None  # `qsdp` of a config
    replicas: int | None = None  # instead of the task's
    fast: int = 1  # `fast` of a config


def _of(config) -> Method:
    run = config.get_config()
    return Method(run.optimizer.update, qsdp=run.qsdp, fast=run.fast)


def _mean(compressor: str, optimizer: str = "adam(learning_rate)", rates=ADAM_RATES) -> Method:
    return Method(f"chain(compressed_mean({compressor}, axis_name), {optimizer})", rates)


def _momentum(compressor: str) -> Method:
    return _mean(compressor, "sgd(learning_rate, momentum=0.9)", SGD_RATES)


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
    "a tenth, groups of 4": "compressor=compose(random_k(0.1), group_top_1(4), quantize(4))",
    "signs of the largest of 64": "compressor=compose(group_top_1(64), sign(block=128))",
    "signs of an eighth": "compressor=compose(random_k(0.125), sign(block=1024))",
    "signs of a sixteenth": "compressor=compose(random_k(0.0625), sign(block=1024))",
    # What of the last one's loss is the mask's, and what the code's, at more bytes.
    "an eighth": "compressor=random_k(0.125)",
    "signs": "compressor=sign(block=1024)",
    # All values now and then, after local steps.
    "4 bits, every 32nd": "compressor=quantize(4), sync_every=32",
    "4 bits, every 8th": "compressor=quantize(4), sync_every=8",
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
    # A quarter of the steps, the longest warm-up that the paper speaks of.
    **{
        f"1-bit Adam, {n} dense steps": Method(
            f"one_bit_adam(learning_rate, axis_name, freeze_step={n})"
        )
        for n in (250, 750)
    },
    "0/1 Adam": _zero_one(),
    # The paper's weights of the variance, and its policy, that freezes it after the warm-up.
    "0/1 Adam, stale variance": _zero_one(", fresh_variance=False"),
    "0/1 Adam, equal weights": _zero_one(", fresh_variance=False, weigh_steps=False"),
    "0/1 Adam, equal weights, frozen": _frozen("fresh_variance=False, weigh_steps=False"),
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
        "variance_compressor=quantize(8), fresh_variance=False)"
    ),
    # A third of the rounds, and variances from a few gradients of 8 bits.
    **{
        f"0/1 Adam, few rounds{name}": Method(
            "zero_one_adam(learning_rate, axis_name, "
            "sync_at=schedules.every(4, steps, after=warmup_steps), "
            f"variance_at=schedules.growing(4), variance_compressor=quantize(8){more})"
        )
        for name, more in {"": "", ", stale variance": ", fresh_variance=False"}.items()
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
    "0/1 Adam, as in the paper": _frozen(
        "precondition=False, fresh_variance=False, weigh_steps=False, variance_floor=0.0, "
        "step_bound=None, bias_correction=False"
    ),
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
            "signs": "sign(block=1024)",
            "signs of an eighth": "compose(random_k(0.125), sign(block=1024))",
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
    "SLAMB, linear": _slamb("density=0.1, rescaling='linear'"),
    "SLAMB, no rescaling": _slamb("density=0.1, b3=1.0"),
    "SLAMB, masked": _slamb("density=0.1, rescaling='masked'"),
    # One quantity after the other, from "SLAMB": b3=0.99, sync_every=25, density=0.1.
    **{f"SLAMB, b3 {b3}": _slamb(f"density=0.1, b3={b3}") for b3 in (0.9, 0.999)},
    **{f"SLAMB, every {h}": _slamb("density=0.1", h) for h in (5, 100)},
    **{f"SLAMB, density {d}": _slamb(f"density={d}") for d in (0.01, 0.05, 0.25)},
    # A sixth of the steps of the tasks.
    **{
        f"1-bit LAMB, {n} dense steps": Method(
            f"one_bit_lamb(learning_rate, axis_name, freeze_step={n})", LAMB_RATES
        )
        for n in (20, 66, 166, 500)
    },
}
