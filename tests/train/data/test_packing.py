"""Documents in sequences: each once an epoch, whole, and unseen by the others."""

import jax
import numpy as np
import pytest

from train.data import packing
from train.data.token_files import Part
from train.models.decoder import Decoder, DecoderConfig
from train.models.modules import PathRngs

CONTEXT = 8
SIZES = [3, 4, 9, 1, 30, 2, 2, 10, 8, 5, 0, 17]


def part_of(sizes, asked=None):
    """Documents whose tokens are 1, 2, 3, ... through all of them."""
    return Part(1 + np.arange(sum(sizes)), np.cumsum(sizes, dtype=np.int64), asked)


def epoch_of(packed, seed=0, epoch=0):
    size = packed.starts.size
    return packing.batch(packed, seed, epoch * size, size)


def test_every_token_but_a_documents_first_is_predicted_once_from_its_own_document():
    part = part_of(SIZES)
    made = epoch_of(packing.pack(part, CONTEXT))
    asked = made["weights"] > 0
    firsts = np.concatenate([[0], part.ends[:-1]])[np.array(SIZES) > 0] + 1
    np.testing.assert_array_equal(
        np.sort(made["targets"][asked]), np.setdiff1d(part.tokens, firsts)
    )
    np.testing.assert_array_equal(made["targets"][asked], made["tokens"][asked] + 1)
    document = np.searchsorted(part.ends, made["tokens"] - 1, "right")
    for row in range(len(asked)):
        filled = made["documents"][row] > 0
        pairs = {*zip(made["documents"][row][filled], document[row][filled], strict=True)}
        assert len(pairs) == len({own for own, _ in pairs}) == len({real for _, real in pairs})
        for own in np.unique(made["documents"][row][filled]):
            places = made["positions"][row][made["documents"][row] == own]
            np.testing.assert_array_equal(places, np.arange(places.size))


def test_whole_documents_lie_behind_each_other_and_only_long_ones_are_cut():
    packed = packing.pack(part_of([3, 4, 2, 9, 30]), CONTEXT)
    assert packed.starts.tolist() == [0, 9, 18, 26, 34, 42]


def test_the_weights_make_the_mean_over_all_rows_that_over_what_is_asked():
    asked = np.random.default_rng(0).random(sum(SIZES)) < 0.3
    packed = packing.pack(part_of(SIZES, asked), CONTEXT)
    whole = packing.batch(packed, 0, 3, 4)
    weights = whole["weights"]
    assert np.isclose(weights.mean(), 1.0) and len(np.unique(weights)) == 2
    assert asked[whole["targets"][weights > 0] - 1].all()
    parts = [packing.batch(packed, 0, 3, 4, slice(at, at + 1)) for at in range(4)]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), array)
        assert array.shape == (4, CONTEXT)
    assert packing.batch(packed, 0, 3, 4, slice(4, 4))["tokens"].shape == (0, CONTEXT)


def test_a_batch_in_which_nothing_is_asked_weighs_nothing():
    packed = packing.pack(part_of(SIZES, np.zeros(sum(SIZES), bool)), CONTEXT)
    assert not packing.batch(packed, 0, 0, 4)["weights"].any()


def test_each_epoch_has_all_sequences_in_another_order():
    packed = packing.pack(part_of([9] * 20), CONTEXT)
    first, second, other = (
        epoch_of(packed, *key)["tokens"][:, 0] for key in ((0, 0), (0, 1), (1,))
    )
    assert sorted(first) == sorted(second) == sorted(other) == list(range(1, 181, 9))
    assert len({tuple(order) for order in (first, second, other, sorted(first))}) == 4
    # Position, not step: a batch of another size goes on where the one before has ended.
    parts = [packing.batch(packed, 0, *at)["tokens"][:, 0] for at in ((0, 6), (6, 9), (15, 5))]
    np.testing.assert_array_equal(np.concatenate(parts), first)


def test_a_shuffle_is_one_of_all_numbers_and_fixed_for_all_time():
    for size in (1, 2, 3, 17, 64, 100):
        assert sorted(packing.shuffled(n, size, "k") for n in range(size)) == list(range(size))
    # Worked out once: a change of these numbers changes every run.
    assert [packing.shuffled(n, 1000, "0 0") for n in range(4)] == [501, 122, 42, 319]


def test_shuffles_are_even():
    counts = np.zeros((5, 5))
    for key in range(1000):
        for number in range(5):
            counts[number, packing.shuffled(number, 5, str(key))] += 1
    # 1,000 draws at 1/5: five standard deviations of 12.6.
    assert np.all(abs(counts - 200) < 63)


def test_validation_is_spread_over_all_sequences():
    packed = packing.pack(part_of([9] * 20), CONTEXT)
    batches = [packing.validation_batch(packed, n, 2, 5) for n in range(2)]
    firsts = np.concatenate([batch["tokens"][:, 0] for batch in batches])
    assert firsts.tolist() == list(range(1, 181, 18))


@pytest.mark.parametrize("form", [{}, {"rotary": "halves", "window": 4}])
def test_a_document_is_seen_as_if_it_were_alone(form):
    config = DecoderConfig(layers=1, width=8, heads=2, context=CONTEXT, vocab=64, **form)
    model = jax.jit(Decoder(config, rngs=PathRngs(0)).__call__)
    made = packing.batch(packing.pack(part_of([3, 5, 1]), CONTEXT), 0, 0, 1)
    tokens, documents, positions = (made[x] for x in ("tokens", "documents", "positions"))
    together = model(tokens, documents, positions)[0]
    # The model is causal: what follows a document changes nothing.
    alone = model(np.stack([tokens[0], np.roll(tokens[0], -3)]))
    np.testing.assert_allclose(together[:3], alone[0, :3], atol=2e-5)
    np.testing.assert_allclose(together[3:], alone[1, :5], atol=2e-5)
