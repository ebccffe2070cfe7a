"""What `resize` holds on a device meanwhile: its own part and a few rows, never all of them."""

import collections
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas import resize
from jaxcomp.replicas.compact import decode, encode
from jaxcomp.replicas.shards import Shard, numel_of, recut

NUMEL = 2**16  # of a row, and so of a parameter in shards
ROW = 4 * NUMEL


@jaxcomp.MethodState.register
class State(NamedTuple):
    """Fields of the library's states, one kind of leaf each."""

    drift: Any
    residual: Any
    owner_residual: Any
    params: Any


def state_of(num_replicas):
    """The parameter of shards and owners' chunks is 0, 1, 2, ...; row i is that plus i."""
    flat = np.arange(NUMEL, dtype=np.float32)
    rows = flat + np.arange(num_replicas, dtype=np.float32)[:, None]
    code = jaxcomp.identity()
    shards = recut(flat[None, : NUMEL - 5], (NUMEL - 5,), num_replicas)
    return State(
        drift=rows,
        residual=jax.tree.map(np.asarray, encode(rows.reshape(num_replicas, -1, 64), 8)),
        owner_residual=(flat.reshape(num_replicas, -1),),
        params=Shard(shards, (NUMEL - 5,), code, code),
    )


def on_mesh(tree, num_devices, kind=AxisType.Auto):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("replica",), axis_types=(kind,))
    return jax.device_put(tree, NamedSharding(mesh, P("replica")))


def most_held(function):
    """What a function returns, and the most bytes that a device has held meanwhile.

    They are those of arrays after every line's calls in the library, and of programs' temporaries.
    """
    temporary, jit = [0], jax.jit
    before = jax.live_arrays()  # thousands, after other tests
    others = set(map(id, before))

    def held():
        sizes = collections.Counter()
        for x in jax.live_arrays():
            for device in () if id(x) in others else x.sharding.device_set:
                part = x.sharding.shard_shape(x.shape)
                sizes[device] += int(np.prod(part)) * x.dtype.itemsize
        return max(sizes.values(), default=0)

    def recording_jit(*args, **kwargs):
        jitted = jit(*args, **kwargs)

        def call(*args):
            memory = jitted.lower(*args).compile().memory_analysis()
            temporary.append(memory.temp_size_in_bytes)
            return jitted(*args)

        return call

    most = [0]

    def watch(frame, event, arg):
        if frame.f_code.co_filename.startswith(resize.__file__.rpartition("/")[0]):
            most.append(held())

    jax.jit = recording_jit
    sys.setprofile(watch)
    try:
        result = function()
    finally:
        sys.setprofile(None)
        jax.jit = jit
    return result, max(most) + max(temporary)


@pytest.mark.parametrize(
    ("source", "kind"),
    [("host", AxisType.Auto), ("mesh", AxisType.Explicit), ("the new mesh", AxisType.Auto)],
)
@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8)])
def test_no_device_holds_the_rows_of_all_replicas(old, new, source, kind):
    state = state_of(old)
    if source != "host":
        # As a checkpoint is restored: rows of as many replicas as it has, on the devices of now.
        state = on_mesh(state, old if source == "mesh" else min(old, new), kind)
    like = on_mesh(state_of(new), new, kind)
    got, held = most_held(lambda: jaxcomp.resize(state, like))

    # One row of drift, one of codes, a part of the rest; and three rows meanwhile: where the old
    # ones are, where the new ones go, and in the programs.
    own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(got))
    assert own < 2 * ROW and held < own + 3.5 * ROW

    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, like)
    flat = np.arange(NUMEL, dtype=np.float32)
    mean = np.broadcast_to(flat + (old - 1) / 2, (new, NUMEL))
    np.testing.assert_array_equal(got.drift, mean)
    residual = np.asarray(decode(got.residual)).reshape(new, NUMEL)
    np.testing.assert_allclose(residual, mean, rtol=0, atol=2 * NUMEL / 254)
    np.testing.assert_array_equal(np.ravel(got.owner_residual[0]), flat)
    assert got.params.data.shape == (new, numel_of((NUMEL - 5,), new))
    np.testing.assert_array_equal(np.ravel(got.params.data)[: NUMEL - 5], flat[: NUMEL - 5])


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32"])
def test_rows_of_devices_come_to_the_host_bit_for_bit(dtype):
    rows = np.random.default_rng(0).normal(size=(4, 3, 2)).round().astype(dtype)
    rows[1, 0, 0] = -0.0 if rows.dtype != bool else True
    for kind in (AxisType.Auto, AxisType.Explicit):
        got = resize.on_host(on_mesh(rows, 4, kind))
        assert got.dtype == rows.dtype and got.tobytes() == rows.tobytes()
