"""What users see of what they made: short texts that read like the calls, in `help()` too."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomp
from jaxcomp import planner, report, schedules
from jaxcomp.compressors import packing
from jaxcomp.exchange import averaging, wire
from jaxcomp.measure import link_probe, step_probe

MODULES = (
    jaxcomp,
    averaging,
    link_probe,
    packing,
    planner,
    report,
    schedules,
    step_probe,
    wire,
)
CALLS = [
    "always",
    "both(until(3), never)",
    "by_path(('bias', identity()), ('.*', quantize(4, block=32)))",
    "cast('bfloat16')",
    "compose(random_k(0.1), top_k(0.2, block=128), quantize(4))",
    "doubling",
    "every(4, 100)",
    "every(4, 100, after=8)",
    "gathered",
    "group_top_1(8)",
    "growing(until=3)",
    "halving(0.1, 100, after=5)",
    "identity()",
    "learned_levels(4)",
    "qsdp('replica')",
    "qsdp('replica', weights=quantize(4), fit_at=never, lookahead=0)",
    "rotated(sign(block=128))",
    "two_shot",
    "two_shot(quantize(4), bucket_numel=100)",
    "gathered(sign(block=8), order=None)",
    "gathered(by_path(('.*', sign(block=8))), seed=3)",
]
NAMES = vars(jaxcomp) | vars(schedules)


def test_no_signature_of_a_public_function_is_a_wall():
    found = {
        f"{module.__name__}.{name}": str(inspect.signature(thing))
        for module in MODULES
        for name, thing in vars(module).items()
        if name[0] != "_" and callable(thing) and thing.__module__.startswith("jaxcomp")
    }
    assert len(found) > 100
    assert [
        name for name, text in found.items() if " at 0x" in text or "typing.Union" in text
    ] == []
    assert max(map(len, found.values())) < 1200


@pytest.mark.parametrize("text", CALLS)
def test_what_a_user_makes_prints_as_a_call_that_makes_it(text):
    made = eval(text, dict(NAMES))
    assert repr(made) == text


def test_the_default_code_prints_as_its_chain():
    assert repr(jaxcomp.cocktail()) == "compose(random_k(0.1), top_k(0.2, block=128), quantize(4))"


def of_vectors(path, leaf):
    return leaf.ndim < 2


def test_functions_of_others_print_by_the_name_of_what_made_them():
    rate = optax.cosine_decay_schedule(0.1, 9)
    assert repr(schedules.halving(rate, 9)) == "halving(cosine_decay_schedule, 9)"
    fsdp = jaxcomp.qsdp("replica", exact=of_vectors)
    assert repr(fsdp) == "qsdp('replica', exact=of_vectors)"


def test_help_of_a_schedule_that_is_a_value_shows_its_text():
    assert schedules.doubling.__doc__.startswith("Steps 1, 2, 4")
    assert schedules.doubling.__name__ == "doubling"
    assert list(inspect.signature(schedules.doubling).parameters) == ["count"]


def test_arrays_print_by_type_and_shape():
    mesh = jax.make_mesh((2,), ("replica",))
    fsdp = jaxcomp.qsdp("replica", exact=lambda path, leaf: False)
    shards = jax.eval_shape(lambda: fsdp.shard({"w": jnp.ones((3, 4))}, mesh))
    assert repr(shards["w"]) == (
        "Shard(float32[2, 6], shape=(3, 4), weights=quantize(8, block=1024, range='minmax'), "
        "gradients=quantize(8, block=1024, range='minmax', rounding='stochastic'))"
    )
    # A tree of specs or of nothing has the same nodes.
    assert repr(jax.tree.map(lambda x: "replica", shards)["w"]).startswith("Shard('replica', ")
    sent = jaxcomp.transmit(jaxcomp.sign(), jnp.array([3.0, -3.0] * 512))
    assert repr(sent) == (
        "Transmission(message=uint8[144], decoded=float32[1024], bits_per_parameter=1.125, "
        "error=0.0)"
    )
