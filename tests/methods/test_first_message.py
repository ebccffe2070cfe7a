"""Whose gradients each message waits for: the first ones leave while others are computed."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp.exchange import journeys
from tests.helpers.dependence import messages
from tests.helpers.replicas import mesh_of, transform

NAMES = ["a", "b", "c", "d"]
CUT = jaxcomp.two_shot(jaxcomp.sign(block=1024), bucket_numel=2048)  # one leaf a bucket
EXACT = jaxcomp.two_shot(jaxcomp.identity(), bucket_numel=2048)
ZERO_ONE = {"compressor": CUT, "variance_compressor": EXACT}
METHODS = {
    "mean": jaxcomp.compressed_mean(CUT, "replica"),
    "one_bit_adam": jaxcomp.one_bit_adam(1e-3, "replica", compressor=CUT),
    "zero_one_adam": jaxcomp.zero_one_adam(1e-3, "replica", **ZERO_ONE),
    "zero_one_adam, warm-up": jaxcomp.zero_one_adam(1e-3, "replica", warmup_steps=9, **ZERO_ONE),
    "one_bit_lamb": jaxcomp.one_bit_lamb(1e-3, "replica", compressor=CUT),
    # An eighth of its momenta travels.
    "slamb": jaxcomp.slamb(
        1e-3,
        "replica",
        compressor=jaxcomp.two_shot(jaxcomp.random_k(1 / 8), bucket_numel=256),
        drift_compressor=jaxcomp.two_shot(jaxcomp.identity(), bucket_numel=256),
        exact_numel=64,
    ),
}
# The last bucket of these tells whether the gradient is finite, so it waits for all.
LAST = ("mean", "one_bit_adam", "one_bit_lamb")


@pytest.mark.parametrize("name", METHODS)
def test_a_message_waits_for_its_own_gradients_alone(name, monkeypatch):
    monkeypatch.setattr(journeys, "platform", lambda: "gpu")  # CPUs join sums, and wait anyway
    mesh, params = mesh_of(2), {leaf: jnp.zeros((32, 64)) for leaf in NAMES}
    init, update = transform(METHODS[name], mesh, params)
    grads = {leaf: jnp.zeros((2, 32, 64)) for leaf in NAMES}
    found = messages(update, grads, jax.eval_shape(init, params), params)
    waits = [{path for path in paths if path.startswith("[0]")} for _, paths in found]
    own = [{f"[0]['{leaf}']"} for leaf in NAMES]
    others = [paths for paths in waits if paths and paths not in own]
    assert [leaf for leaf in own if leaf in waits] == own[: 3 if name in LAST else 4]
    assert all(paths == set().union(*own) for paths in others)
    assert bool(others) == (name in LAST)
