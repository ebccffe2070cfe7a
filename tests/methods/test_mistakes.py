"""Arguments that a method cannot have are refused by what was got and what to write."""

import math
import re

import optax
import pytest

import jaxcomp
from tests.helpers.replicas import PARAMS, mesh_of, transform


def sgd(make):
    return lambda **options: make(optax.sgd(0.1), "replica", **options)


def rate(make):
    return lambda **options: make(0.1, "replica", **options)


def deviations(**options):
    return {"deviations": jaxcomp.Deviations(**options)}


MAKERS = {
    "clip_by_global_norm": jaxcomp.clip_by_global_norm,
    "cocktail_sgd": sgd(jaxcomp.cocktail_sgd),
    "demo": rate(jaxcomp.demo),
    "diloco": sgd(jaxcomp.diloco),
    "dion": rate(jaxcomp.dion),
    "local_steps": lambda every=2, **options: sgd(jaxcomp.local_steps)(every=every, **options),
    "loss_scale": sgd(jaxcomp.loss_scale),
    "mean_momentum": lambda inner: jaxcomp.mean_momentum(inner, "replica"),
    "muon": jaxcomp.muon,
    "one_bit_adam": rate(jaxcomp.one_bit_adam),
    "one_bit_lamb": rate(jaxcomp.one_bit_lamb),
    "power_sgd": lambda rank=2, **options: jaxcomp.power_sgd(rank, "replica", **options),
    "rare_rows": lambda inner: jaxcomp.rare_rows(inner, "replica"),
    "slamb": rate(jaxcomp.slamb),
    "zero_one_adam": rate(jaxcomp.zero_one_adam),
}
ALWAYS, DRAWN = jaxcomp.schedules.always, jaxcomp.random_k(0.25, pattern="random")
MISTAKES = {
    "clip_by_global_norm": [
        ({"max_norm": norm}, f"got max_norm={norm}; needs a positive number")
        for norm in (0, -1.0, float("nan"))
    ],
    "cocktail_sgd": [
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 2.5}, "sync_every=2.5; needs integers"),
    ],
    "demo": [
        ({"decay": 1.5}, "decay=1.5; needs [0, 1]"),
        ({"top": 0}, "top=0; needs at least 1"),
        ({"top": 2.5}, "top=2.5; needs at least 1, as an integer"),
        ({"tile": 1}, "tile=1; needs at least 2"),
        ({"weight_decay": "0.1"}, "weight_decay='0.1'; needs a finite number"),
        ({"mean": jaxcomp.two_shot(jaxcomp.sign())}, "needs an exchange without a code; write"),
    ],
    "diloco": [
        ({"outer_rate": math.nan}, "diloco got outer_rate=nan; needs a finite number or a sch"),
    ],
    "dion": [
        ({"rank": 0}, "rank=0; needs at least 1"),
        ({"rank": 2, "momentum": 1.0}, "momentum=1.0; needs [0, 1"),
        ({"rank": 2, "weight_decay": math.nan}, "weight_decay=nan; needs a finite number"),
    ],
    "local_steps": [
        ({"every": 0}, "every=0; needs at least 1, as an integer; write every=16"),
        ({"every": 12.5}, "every=12.5; needs at least 1, as an integer"),  # they would never meet
        ({"every": "16"}, "every='16'; needs at least 1, as an integer"),
        ({"error_decay": 1.5}, "error_decay=1.5; needs (0, 1], or None"),
        ({"delay": 3}, "delay=3; needs an integer from 0 to `every`"),
        ({"keep": 1.0}, "keep=1.0; needs [0, 1)"),
        ({"fragments": 0}, "fragments=0; needs at least 1"),
        ({"code": None, "delay": 1}, "code=None; needs no feedback, delay or frag"),
        ({"every": ALWAYS, "delay": 1}, "delay=1; needs 1 and 0 with a schedule"),
    ],
    "loss_scale": [
        ({"initial": 0.5}, "initial=0.5; needs a scale from 1 to 2**24; write"),
        ({"initial": 2.0**25}, "loss_scale got initial=33554432.0; needs"),
        ({"growth_steps": 0}, "growth_steps=0; needs at least 1 and below 2**31; write"),
        ({"growth_steps": 2**31}, "growth_steps=2147483648; needs"),
    ],
    "muon": [
        ({"learning_rate": "fast"}, "muon got learning_rate='fast'"),
        ({"learning_rate": 1e-2, "momentum": 1.5}, "muon got momentum=1.5; needs [0, 1)"),
        ({"learning_rate": 1e-2, "weight_decay": math.inf}, "weight_decay=inf; needs a finite"),
    ],
    "one_bit_adam": [
        (deviations(weigh_steps=False), "weigh_steps=False to zero_one_adam alone"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"freeze_step": 0}, "freeze_step=0"),
        ({"freeze_ratio": 1.0}, "freeze_ratio=1.0"),
    ],
    "mean_momentum": [({"inner": 3}, "mean_momentum got 3 where")],
    "one_bit_lamb": [
        ({"eps": 0.0}, "one_bit_lamb got eps=0.0"),
        ({"freeze_step": 0}, "one_bit_lamb got freeze_step=0"),
        ({"trust": jaxcomp.TrustRatio((2, 1))}, "one_bit_lamb got bounds=(2, 1)"),
        ({"trust": jaxcomp.TrustRatio(factor_bounds=(-1, 1))}, "factor_bounds=(-1, 1)"),
        ({"trust": jaxcomp.TrustRatio(decay=1.0)}, "decay=1.0"),
        ({"trust": jaxcomp.TrustRatio(factor_change=0.0)}, "factor_change=0.0"),
    ],
    "power_sgd": [
        ({"rank": 0}, "rank=0; needs at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1; needs at least 0"),
        ({"least": 0.0}, "least=0.0; needs more than 0"),
        ({"sides": "one"}, "sides='one'; needs a known form; write 'alternating' or 'both'"),
    ],
    "rare_rows": [({"inner": 3}, "rare_rows got 3 where")],
    "slamb": [
        ({"b1": 1.0}, "slamb got b1=1.0"),
        ({"weight_decay": math.nan}, "weight_decay=nan; needs a finite number; write weight_dec"),
        ({"density": 0.3}, "1 / density to be an integer"),
        ({"sync_every": 0}, "sync_every=0"),
        ({"sync_every": 12.5}, "sync_every=12.5; needs at least 1, as an integer"),
        ({"density": 0.25, "compressor": DRAWN}, "density=0.25, compressor="),
        ({"rescaling": jaxcomp.Rescaling(b3=1.5)}, "b3=1.5"),
        ({"rescaling": jaxcomp.Rescaling("cubic")}, "form='cubic'"),
        ({"rescaling": jaxcomp.Rescaling(trust_bounds=(2.0, 1.0))}, "trust_bounds=(2.0, 1.0)"),
        ({"variance": "both"}, "variance='both'"),
    ],
    "zero_one_adam": [
        ({"b1": 1.0}, "b1=1.0"),
        (deviations(variance_floor=1.0), "variance_floor=1.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_compressor": ALWAYS}, "for warmup_comp"),
        ({"sync_at": 4}, "sync_at=4, variance_at=None; needs schedules"),
    ],
}


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [(method, *row) for method, rows in MISTAKES.items() for row in rows],
)
def test_wrong_arguments_are_refused(method, options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        MAKERS[method](**options)


AVERAGING = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.sgd(0.1))
APART = {"sync_at": lambda count: count % 2 == 0, "variance_at": jaxcomp.schedules.growing()}
REFUSED = {
    "an average in cocktail_sgd": (
        jaxcomp.cocktail_sgd(AVERAGING, "replica"),
        "its inner optimizer must be local",
    ),
    "an average in local_steps": (
        jaxcomp.local_steps(AVERAGING, "replica", every=2),
        "write local_steps(optax.adamw",
    ),
    "a replica's own entries": (
        jaxcomp.slamb(0.1, "replica", compressor=jaxcomp.top_k(0.1), exact_numel=0),
        "for 'kernel'; needs entries that all",
    ),
    "schedules that do not fit each other": (
        jaxcomp.zero_one_adam(0.1, "replica", **APART),
        "variance_at holds at count 1, where sync_at does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_when_a_state_is_made(name):
    tx, text = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        init, update = transform(tx, mesh_of(2), PARAMS)
        grads = {name: x[None].repeat(2, 0) for name, x in PARAMS.items()}
        update(grads, init(PARAMS), PARAMS)
