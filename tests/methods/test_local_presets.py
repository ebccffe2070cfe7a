"""Published settings: that they train, and what they send."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import report
from tests.helpers.replicas import mesh_of

PARAMS = {"b": np.zeros(8, np.float32), "u": np.eye(8, 64, dtype=np.float32) / 2,
          "w": np.ones((64, 8), np.float32) / 8}  # fmt: skip
PRESETS = {
    "diloco": jaxcomp.diloco(optax.adamw(1e-2), "replica", every=4),
    "streaming_diloco": jaxcomp.streaming_diloco(
        optax.adamw(1e-2), "replica", every=4, fragments=2
    ),
    "sparse_loco": jaxcomp.sparse_loco(optax.adamw(1e-2), "replica", every=4),
    "muloco": jaxcomp.muloco(1e-2, "replica", every=4),
}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["u"]) @ params["w"] + params["b"][None] - batch) ** 2)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_lowers_the_loss_of_the_consensus(name):
    init, step = jaxcomp.simulated_train_step(loss_fn, PRESETS[name], 4, "replica")
    params = jax.tree.map(jnp.asarray, PARAMS)
    state, batch = init(params), np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    before = loss_fn(params, batch)
    for _ in range(12):
        params, state, metrics = step(params, state, batch)
    assert not metrics["skipped"]
    assert loss_fn(params, batch) < 0.95 * before


GROUPS = jaxcomp.compose(jaxcomp.group_top_1(64), jaxcomp.bin_means(2))


@pytest.mark.parametrize(
    ("make", "options", "fewer"),
    [
        (jaxcomp.sparse_loco, {"density": 1 / 64}, 204.8),
        (jaxcomp.local_steps, {"code": jaxcomp.gathered(GROUPS)}, 256.0),
    ],
    ids=["sparse_loco", "groups"],
)
def test_sparse_codes_send_so_many_times_fewer_bytes_in_a_round_and_none_between(
    make, options, fewer
):
    """A 64th of the entries, by 2 bits of value and 8 of position; or 6 in groups of 64."""
    mesh, numel = mesh_of(2), 4096 * 1280
    tx = make(optax.sgd(0.1), "replica", every=30, **options)
    loss = lambda params, batch: jnp.vdot(params["w"], params["w"]) * jnp.mean(batch)
    init, step = jaxcomp.train_step(loss, tx, mesh, "replica")
    params = {"w": jax.ShapeDtypeStruct((numel,), jnp.float32)}
    batch = jax.ShapeDtypeStruct((4,), jnp.float32)
    program = step.lower(params, jax.eval_shape(init, params), batch).compile()
    sent = report.sent_bytes_by_part(program, mesh, "replica")
    assert set(sent) == {"", "synchronize"} and sent[""] == 0
    dense = 4 * numel  # of every replica to every other one
    assert round(dense / sent["synchronize"], 1) == fewer
