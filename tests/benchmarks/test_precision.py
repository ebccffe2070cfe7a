"""Narrow parameters and states on a small model: the rows of the program."""

import jax
import optax
import pytest

import jaxcomp
from benchmarks.studies import precision

NARROW = {"residual": "int8", "momentum": "bfloat16", "remainder": "bfloat16"}


@pytest.mark.parametrize("name", ["compressed_mean", "zero_one_adam"])
def test_every_row_keeps_what_it_names_in_few_bits(name):
    for row, way in precision.WAYS.items():
        if row == "bfloat16, no masters":
            continue  # which warns, and has optax's moments in bfloat16
        tx = precision.transformation(name, way, optax.constant_schedule(1e-3))
        init, _ = jaxcomp.simulated_train_step(precision.loss_fn, tx, 2, "replica")
        state = jax.eval_shape(init, precision.first_params(0, way.dtype))
        found = {x.dtype.name for x in jax.tree.leaves(state)} - {"float32", "int32"}
        assert found == {NARROW[part] for part in way.around if part in NARROW}, row
