"""DeMo: its authors' own steps, the transform, and what is sent."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import report
from jaxcomp.methods.demo import cosines
from tests.helpers import replicas
from tests.helpers.replicas import history_of, mesh_of, one_value, rows, transform

SHAPES = {"bias": (6,), "kernel": (4, 8), "of_three": (2, 2, 4), "scale": ()}
random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


@pytest.mark.parametrize("n", [1, 7, 64])
def test_the_cosine_transform_is_orthonormal_and_its_first_coefficient_the_mean(n):
    matrix = cosines(n)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(matrix @ np.ones(n), np.eye(n)[0] * np.sqrt(n), atol=1e-12)
    wave = np.cos(np.pi * (np.arange(n) + 0.5) * (n // 2) / n)
    assert np.argmax(np.abs(matrix @ wave)) == n // 2


def test_with_all_coefficients_it_steps_by_the_sign_of_the_mean_gradient():
    tx = jaxcomp.demo(0.5, "replica", top=64, tile=8, weight_decay=0.25)
    start, grads = random_tree(0), [random_tree(1, 4), random_tree(2, 4)]
    params, state = history_of(tx, start, grads, 4)[-1]
    for name, x in start.items():
        for grad in grads:
            x = x * (1 - 0.5 * 0.25) - 0.5 * np.sign(grad[name].mean(axis=0))
        np.testing.assert_allclose(one_value(params[name]), x, atol=1e-6)
        np.testing.assert_allclose(state.residual[name], 0, atol=1e-6)


def test_a_message_holds_coefficients_and_their_places():
    mesh, params = mesh_of(2), {"w": np.zeros((64, 128), np.float32)}
    init, update = transform(jaxcomp.demo(1e-3, "replica"), mesh, params)
    args = rows(mesh, {"w": np.zeros((2, 64, 128), np.float32)}), init(params), params
    sent = report.sent_bytes(update.lower(*args).compile(), mesh, "replica")
    assert 0 <= sent - 2 * 32 * (32 + 9) / 8 <= 16


SHAPES_SENT = [
    *[(7,), (41,), (64,), (67,), (1021,), (1, 1021), (1021, 1), (4, 1), (), (32003, 16)],
    *[(2 * 509, 64), (251 * 61, 7), (3, 67, 5), (65, 65), (127, 131), (2, 3, 11)],
]


def test_owners_send_as_much_for_any_number_of_replicas():
    params, values = {"w": np.zeros((512, 256), np.float32)}, jaxcomp.quantize(4)
    tx = jaxcomp.demo(1e-3, "replica", values=values, mean=jaxcomp.two_shot)
    sent = {}
    for num_replicas in (2, 8):
        mesh = mesh_of(num_replicas)
        init, update = transform(tx, mesh, params)
        args = rows(mesh, {"w": np.zeros((num_replicas, 512, 256), np.float32)})
        program = update.lower(args, init(params), params).compile()
        sent[num_replicas] = report.sent_bytes(program, mesh, "replica")
    # 32 tiles of 32 coefficients, with places of 9 bits and a scale for each message and tile.
    whole = 2 * 32 * 32 * (4 + 9) / 8
    for num_replicas, found in sent.items():
        share = (num_replicas - 1) / num_replicas
        assert whole * share <= found <= 1.1 * whole * share + 16


def test_owners_pass_on_the_largest_of_the_mean_and_keep_the_others():
    """Two replicas, two tiles, so that each owns a tile."""
    tx = jaxcomp.demo(0.5, "replica", decay=0.75, top=4, tile=8, mean=jaxcomp.two_shot)
    start = {"w": np.zeros((16, 8), np.float32)}
    grads = [random_tree(t, 2, shapes={"w": (16, 8)}) for t in range(3)]
    turn, basis = np.einsum, cosines(8)
    momenta, owed, want = np.zeros((2, 2, 8, 8)), np.zeros((2, 8, 8)), np.zeros((16, 8))

    def largest(tile):
        least = np.sort(np.abs(tile), axis=None)[-4]
        return np.where(np.abs(tile) >= least, tile, 0)

    for step, grad in enumerate(grads):
        momenta = 0.75 * momenta + 0.5 * grad["w"].reshape(2, 2, 8, 8)
        turned = turn("ai,rtij,bj->rtab", basis, momenta, basis)
        sent = np.stack([[largest(tile) for tile in own] for own in turned])
        momenta -= turn("ai,rtab,bj->rtij", basis, sent, basis)
        total = sent.mean(axis=0) + owed
        passed = np.stack([largest(tile) for tile in total])
        owed = total - passed
        want -= 0.5 * np.sign(turn("ai,tab,bj->tij", basis, passed, basis)).reshape(16, 8)
        params, state = history_of(tx, start, grads[: step + 1], 2)[-1]
        np.testing.assert_allclose(one_value(params["w"]), want, atol=1e-6)
        np.testing.assert_allclose(state.residual["w"], momenta.reshape(2, 16, 8), atol=1e-5)
        (kept,) = state.owner_residual
        np.testing.assert_allclose(kept, owed.reshape(2, 64), atol=1e-5)


@pytest.mark.parametrize("mean", [jaxcomp.from_senders, jaxcomp.two_shot])
def test_a_gradient_that_is_not_finite_changes_no_state(mean):
    tx = jaxcomp.demo(0.5, "replica", top=4, tile=8, mean=mean)
    shapes = {"w": (16, 8)}
    bad = random_tree(1, 2, shapes=shapes)
    bad["w"][0, 3, 3] = np.nan
    start, grads = random_tree(0, shapes=shapes), [random_tree(2, 2, shapes=shapes), bad]
    (_, before), (params, after) = history_of(tx, start, grads, 2)[-2:]
    assert np.isnan(params["w"]).all()
    kept = lambda state: (state.residual, state.owner_residual)
    jax.tree.map(np.testing.assert_array_equal, kept(before), kept(after))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(kept(after)))


@pytest.mark.parametrize(
    ("num_replicas", "more"),
    [
        (4, {}),
        (2, {"values": jaxcomp.cast("float16")}),
        (4, {"mean": jaxcomp.two_shot}),
    ],
)
def test_no_shape_sends_more_than_a_dense_all_reduce(num_replicas, more):
    mesh = mesh_of(num_replicas)
    demo = jaxcomp.demo(1e-3, "replica", **more)
    found = {}
    for shape in SHAPES_SENT:
        params = {"w": np.zeros(shape, np.float32)}
        args = rows(mesh, {"w": np.zeros((num_replicas, *shape), np.float32)})
        init, update = transform(demo, mesh, params)
        program = update.lower(args, jax.eval_shape(init, params), params).compile()
        sent = report.sent_bytes(program, mesh, "replica")
        # A ring's reduce-scatter and all-gather, in float32, of as many numbers for each replica.
        found[shape] = sent, 2 * (num_replicas - 1) * 4 * -(-np.prod(shape) // num_replicas)
    # The flag that tells of what is not finite: a word.
    assert not {shape: sent for shape, sent in found.items() if sent[0] > sent[1] + 8}
    # Matrices are few coefficients, whatever their sides.
    assert all(8 * found[s][0] < found[s][1] for s in [(32003, 16), (1018, 64), (65, 65)])


@pytest.mark.parametrize("shape", [(67, 131), (131,), (2, 33, 67)])
def test_padded_tiles_keep_in_the_momentum_what_was_not_sent(shape):
    """Nothing comes back from the padding, and all coefficients are the gradient."""
    tx = jaxcomp.demo(1.0, "replica", top=4, decay=1.0, mean=jaxcomp.gathered)
    start = {"w": np.zeros(shape, np.float32)}
    grads = [random_tree(t, 2, shapes={"w": shape}) for t in range(2)]
    _, state = history_of(tx, start, grads, 2)[-1]
    total, left = sum(g["w"] for g in grads), np.asarray(state.residual["w"])
    assert left.shape == total.shape and 0.1 < np.linalg.norm(left) / np.linalg.norm(total) < 1
    # All coefficients together are the gradient itself, in padded tiles as in whole ones.
    tx = jaxcomp.demo(1.0, "replica", top=5000)
    params, state = history_of(tx, start, grads, 2)[-1]
    np.testing.assert_allclose(state.residual["w"], 0, atol=1e-5)
    wanted = -sum(np.sign(g["w"].mean(axis=0)) for g in grads)
    np.testing.assert_allclose(one_value(params["w"]), wanted, atol=1e-5)


def test_a_label_that_no_parameter_has_is_named():
    params = {"w": np.ones((8, 8), np.float32)}
    apart = {"mine": jaxcomp.demo(1e-2, "replica"), "others": jaxcomp.slamb(1e-2, "replica")}
    tx = optax.partition(apart, {"w": "others"})
    init, step = jaxcomp.train_step(lambda p, b: (b @ p["w"]).mean(), tx, mesh_of(2), "replica")
    with pytest.raises(ValueError, match=r"optax\.partition, leave out a label"):
        step(params, init(params), np.ones((2, 8), np.float32))
