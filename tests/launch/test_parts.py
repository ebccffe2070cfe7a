"""The parts of a state come back bit for bit on any devices; what has changed is none."""

from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.launch import parts
from tests.helpers.replicas import everywhere, mesh_of, rows

TOKEN = "of one start"


def tree_on(mesh):
    count = mesh.size
    draw = np.random.default_rng(0)
    return {
        "params": everywhere(
            mesh,
            {
                "kernel": draw.standard_normal((4, 3), np.float32),
                "narrow": draw.standard_normal(5).astype(ml_dtypes.bfloat16),
                "count": np.int32(7),
            },
        ),
        "state": rows(
            mesh,
            {
                "residual": draw.standard_normal((count, 4, 3), np.float32),
                "none": np.zeros((count, 0), np.float32),
            },
        ),
    }


def shapes(tree, spec_of=lambda x: x.sharding):
    one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spec_of(x))
    return jax.tree.map(one, tree)


@pytest.fixture
def saved(tmp_path):
    """A tree on four replicas, and the files of its parts."""
    tree = tree_on(mesh_of(4))
    record = {"run": {"step": 3}}
    files = [
        parts.write(tmp_path, TOKEN, 3, part, 1, held, record)
        for part, held in parts.cut(tree, 0).items()
    ]
    return tree, files


def same(tree, other):
    bits = lambda a, b: (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())
    return jax.tree.all(jax.tree.map(bits, tree, other))


@pytest.mark.parametrize("size", [4, 2, 8, 1])
def test_a_tree_comes_back_on_any_devices(saved, size):
    tree, files = saved
    mesh = mesh_of(size)
    spread = lambda x: NamedSharding(mesh, P(None, "replica") if x.shape[:2] == (4, 4) else P())
    like = shapes(tree, spread if size in (2, 4) else lambda x: NamedSharding(mesh, P()))
    held = [entry for file in files for entry in parts.read(file)[0]]
    found = parts.assembled(like, held)
    assert same(tree, found)
    assert jax.tree.all(jax.tree.map(lambda x, to: x.sharding == to.sharding, found, like))
    assert all(parts.read(file)[1] == {"run": {"step": 3}} for file in files)


def test_a_copy_stays_when_its_arrays_are_donated():
    tree = tree_on(mesh_of(2))
    wanted = jax.tree.map(np.array, tree)
    held = parts.cut(tree, 0)
    jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(tree)
    for entry, array in (pair for each in held.values() for pair in each):
        whole = wanted
        for key in entry.path.split("/"):
            whole = whole[key]
        region = tuple(slice(*span) for span in entry.spans)
        assert array.tobytes() == whole[region].tobytes()


class Device:
    def __init__(self, process):
        self.process_index = process


class Sharding:
    """Of two arrays' rows over the devices of three processes, and of a replicated array."""

    def __init__(self, rows):
        self.rows, self.devices = rows, [Device(n // 2) for n in range(6)]
        self.device_set = set(self.devices)

    def devices_indices_map(self, shape):
        if not self.rows:
            return dict.fromkeys(self.devices, (slice(None),))
        return {device: (slice(n, n + 1),) for n, device in enumerate(self.devices)}


def test_what_all_processes_hold_is_one_part_and_the_rest_is_each_ones_own():
    leaf = lambda rows: SimpleNamespace(shape=(6,), dtype="float32", sharding=Sharding(rows))
    tree = {"params": leaf(False), "row": leaf(True)}
    found = parts.entries(tree, 1)
    assert found == {
        "all": [parts.Entry("params", "float32", ((0, 6),))],
        "1": [parts.Entry("row", "float32", ((n, n + 1),)) for n in (2, 3)],
    }


def test_a_name_is_of_its_bytes_its_step_and_its_start(saved):
    _, (file, _) = saved
    name, made = parts.read_name(file.name), parts.digest(file)
    assert (name.step, name.part, name.count) == (3, "all", 1)
    assert parts.belongs_to(name, TOKEN, made)
    assert not parts.belongs_to(name, "of another start", made)
    assert not parts.belongs_to(name._replace(step=4), TOKEN, made)
    assert not parts.belongs_to(name._replace(part="0"), TOKEN, made)
    data = bytearray(file.read_bytes())
    for damage in (len(data) - 1, 3):
        changed = bytearray(data)
        changed[damage] ^= 1
        file.write_bytes(changed)
        assert not parts.belongs_to(name, TOKEN, parts.digest(file))
    file.write_bytes(data[:-1])
    assert not parts.belongs_to(name, TOKEN, parts.digest(file))


@pytest.mark.parametrize(
    "text", ["", "3-all-of-1", "3-all-of-1." + "A" * 64, "../3-0-of-1." + "a" * 64, "3-x-of-1.ab"]
)
def test_other_names_are_of_no_part(text):
    assert parts.read_name(text) is None


def test_a_piece_that_is_missing_is_named(saved):
    tree, files = saved
    held = [entry for file in files for entry in parts.read(file)[0]]
    lacking = [pair for pair in held if pair[0].path != "state/residual"]
    with pytest.raises(ValueError, match="12 entries of state/residual are in no part"):
        parts.assembled(shapes(tree), lacking)


def test_keys_with_a_slash_are_no_path_of_two_keys():
    tree = everywhere(mesh_of(2), {"a": {"b": np.float32([1, 2])}, "a/b": np.float32([3, 4])})
    held = [pair for each in parts.cut(tree, 0).values() for pair in each]
    assert same(tree, parts.assembled(shapes(tree), held))


def test_a_full_disk_leaves_nothing_of_a_part(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.rename", full)
    with pytest.raises(OSError, match="No space"):
        parts.write(tmp_path, TOKEN, 3, "0", 1, [], {})
    assert list(tmp_path.iterdir()) == []
