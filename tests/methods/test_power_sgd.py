"""PowerSGD: torch's own steps, what error feedback keeps, and one message a step."""

import functools
import pathlib

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import report
from tests.helpers import replay, replicas
from tests.helpers.replicas import history_of, mesh_of, one_value, rows, transform

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "power_sgd.npz"
# Two matrices of one shape, one by three axes, and what travels exact.
SHAPES = {"a": (12, 20), "b": (12, 20), "bias": (5,), "c": (8, 4, 4), "small": (2, 3)}
random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def make(rank=2, warmup_steps=0, **options):
    return jaxcomp.power_sgd(rank, "replica", warmup_steps=warmup_steps, **options)


def sgd(**options):
    return optax.chain(make(**options), optax.sgd(1.0))


def test_replays_the_hook_of_torch():
    errors = list(replay.errors(GOLDEN))
    assert len(errors) == 12 and max(errors) < 1e-6


@pytest.mark.parametrize("options", [{}, {"sides": "both"}, {"warmup_steps": 2, "rank": 1}])
def test_error_feedback_loses_nothing(options):
    start, grads = random_tree(0), [random_tree(1 + t, 4) for t in range(5)]
    params, (state, *_) = history_of(sgd(**options), start, grads, 4)[-1]
    for name in SHAPES:
        moved = np.sum([g[name].mean(axis=0) for g in grads], axis=0)
        kept = 0 if state.residual[name] is None else np.asarray(state.residual[name]).mean(axis=0)
        np.testing.assert_allclose(one_value(params[name]), start[name] - moved + kept, atol=2e-5)
        assert (state.residual[name] is None) == (name in ("bias", "small"))
    counts = {name: int(n) for name, n in state.rounds.items()}
    warm = options.get("warmup_steps", 0)
    of_both = "sides" in options
    wanted = {"left_factor": 5 if of_both else 3 - warm // 2, "right_factor": 5 if of_both else 2}
    wanted["right_factor"] -= warm // 2
    assert counts == {"all": 5, "warmup": warm, **wanted}


@pytest.mark.parametrize(("sides", "due"), [("both", 1), ("alternating", 2)])
def test_a_gradient_of_no_higher_rank_arrives_whole_after_one_that_was_zero(sides, due):
    """The factor on the left has its columns' span, so that the one on the right leaves nothing."""
    left, right = random_tree(3)["a"][:, :2], random_tree(4)["a"][:2]
    zero = jax.tree.map(np.zeros_like, random_tree(0, 2))
    low = zero | {"a": np.stack([left @ right * s for s in (0.5, 1.5)]).astype(np.float32)}
    start, grads = jax.tree.map(lambda x: x[0], zero), [zero, zero, *[low] * due]
    params, (state, *_) = history_of(sgd(sides=sides), start, grads, 2)[-1]
    np.testing.assert_allclose(one_value(params["a"]), -due * (left @ right), atol=1e-4)
    np.testing.assert_allclose(state.residual["a"], 0, atol=1e-4)


@pytest.mark.parametrize("sides", ["both", "alternating"])
def test_a_rank_above_the_smaller_side_sends_matrices_whole(sides):
    start, grads = random_tree(0), [random_tree(1 + t, 4) for t in range(4)]
    params, (state, *_) = history_of(sgd(rank=50, least=0.01, sides=sides), start, grads, 4)[-1]
    assert state.left["small"].shape == (2, 2) and state.right["small"].shape == (3, 2)
    moved = np.sum([g["small"].mean(axis=0) for g in grads], axis=0)
    kept = np.asarray(state.residual["small"]).mean(axis=0)
    wanted = start["small"] - moved + kept
    np.testing.assert_allclose(one_value(params["small"]), wanted, atol=1e-5)
    if sides == "both":
        np.testing.assert_allclose(kept, 0, atol=1e-5)


def test_one_all_reduce_a_step_of_one_factor_and_the_exact_leaves():
    mesh, params = mesh_of(2), random_tree(0)
    init, update = transform(make(warmup_steps=1), mesh, params)
    args = rows(mesh, random_tree(1, 2)), init(params), params
    program = update.lower(*args).compile()
    found = {row.part: row for row in report.collectives(program, mesh) if row.shape}
    big = {part: row for part, row in found.items() if part}
    assert {row.op for row in big.values()} == {"all-reduce"}
    exact = 5 + 6
    floats = {
        "warmup": sum(x.size for x in params.values()),
        "left_factor": 2 * (12 + 12 + 8) + exact,
        "right_factor": 2 * (20 + 20 + 16) + exact,
    }
    sent = report.sent_bytes_by_part(program, mesh, "replica")
    for part, number in floats.items():
        # Two replicas: half of the bucket each way; buckets are padded to their number.
        assert 0 <= sent[part] - 4 * number <= 8
    assert len(big) == len(floats)


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_replica():
    mesh, params, grads = mesh_of(2), random_tree(0), random_tree(1, 2)
    init, update = transform(make(), mesh, params)
    state = init(params)
    grads["bias"][1, 0] = np.inf
    updates, after = update(rows(mesh, grads), state, params)
    assert all(np.all(np.isnan(one_value(x))) for x in jax.tree.leaves(updates))
    for name in ("residual", "left", "right"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "rank=0; needs at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1; needs at least 0"),
        ({"least": 0.0}, "least=0.0; needs more than 0"),
        ({"sides": "one"}, "sides='one'; needs a known form; write 'alternating' or 'both'"),
    ],
)
def test_mistakes_are_told(options, text):
    with pytest.raises(ValueError, match=text):
        make(**options)
