"""What is saved is what is read, and what cannot be read is said."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers.launching import ROOT, until
from tests.helpers.replicas import mesh_of
from tests.helpers.restoring import restore
from train.checkpoints import files, store
from train.checkpoints.files import latest, steps
from train.checkpoints.store import choose, open_checkpoints
from train.checkpoints.trees import with_rows


class State(NamedTuple):
    count: Any
    residual: Any
    nothing: Any = None


def replicated(mesh):
    return NamedSharding(mesh, PartitionSpec())


def per_replica(mesh):
    return NamedSharding(mesh, PartitionSpec("replica"))


def make_tree(mesh, fill=0, width=5):
    """One leaf of each kind that a run has; the replicas' residuals differ."""
    num_replicas = mesh.shape["replica"]
    shared = {
        "bf16": jnp.array([1.5, jnp.nan, -0.0, 3.0e38], jnp.bfloat16),
        "f16": jnp.array([[1, 2], [3, 65504]], jnp.float16),
        "f8": jnp.arange(8).astype(jnp.float8_e4m3fn),
        "f32": jnp.full((3, width), 1 / 3, jnp.float32) + fill,
        "scalar": jnp.float32(jnp.inf),
        "one": jnp.zeros((1, 1)),
        "empty": jnp.zeros((0,)),
    }
    counts = {
        "u32": jnp.uint32(2**32 - 1),
        "u8": jnp.arange(256, dtype=jnp.uint8),
        "i32": jnp.array([-(2**31), 2**31 - 1], jnp.int32),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(3),
    }
    residual = {
        "w": jnp.arange(num_replicas * 6, dtype=jnp.float32).reshape(num_replicas, 2, 3) + fill,
        "empty": jnp.zeros((num_replicas, 0), jnp.bfloat16),
    }
    return {
        "params": jax.device_put(shared, replicated(mesh)),
        "state": (
            State(
                jax.device_put(counts, replicated(mesh)),
                jax.device_put(residual, per_replica(mesh)),
            ),
            optax.EmptyState(),
        ),
        "step": 7 + fill,
    }


def target(tree):
    """The tree without its values, as a program that resumes has it."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


def as_bytes(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert type(a) is type(b), path
        assert as_bytes(a) == as_bytes(b), path
        if isinstance(b, jax.Array):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), path
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim), path


def save_steps(directory, mesh, which, **metadata):
    checkpoints = open_checkpoints(directory, keep=9)
    for step in which:
        checkpoints.save(step, make_tree(mesh, step), {"step": step, **metadata})
    checkpoints.close()


@pytest.fixture(autouse=True)
def leaves_no_thread_and_no_noise(capfd):
    before = set(threading.enumerate())
    yield
    # Orbax's event loops tell their threads to end, but do not wait for it.
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield directory
    # Orbax's threads may have a file open for a moment longer.
    end = time.monotonic() + 10
    while subprocess.run(["umount", directory], capture_output=True).returncode:
        assert time.monotonic() < end, f"somebody still uses {directory}"
        time.sleep(0.05)


def test_every_kind_of_leaf_returns_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = make_tree(mesh_of(4)) | {"numpy": np.arange(6, dtype=np.float64).reshape(2, 3), "b": 2.5}
    metadata = {"num_replicas": 4, "config": {"lr": 1e-3, "name": "n", "none": None}, "t": [1, 2]}
    checkpoints = open_checkpoints("new/folder")
    checkpoints.save(7, tree, metadata)
    checkpoints.close()
    got, got_metadata, step = restore("new/folder", target(tree))
    assert_same(got, tree)
    assert (got_metadata, step) == (metadata, 7)
    assert choose("new/folder", item="metadata").metadata == metadata
    assert_same(restore("new/folder", tree)[0], tree)
    loaded = store.load(store.choose("new/folder", 7, "metadata"), target(tree))
    assert_same(loaded, tree)


@pytest.mark.parametrize("parts", [[{"w": 1}], [{"w": 1}, (), None, ()], [{"w": 1, "none": ()}]])
def test_parts_without_leaves_may_come_and_go(tmp_path, parts):
    tree = lambda parts, fill: jax.tree.map(lambda _: jnp.full(3, fill), {"state": parts})
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, tree([{"w": 1}, ()], 2.5), {})
    checkpoints.close()
    assert_same(restore(tmp_path, tree(parts, 0.0))[0], tree(parts, 2.5))


@pytest.mark.parametrize("num_devices, spec", [(2, ("replica",)), (8, (None,)), (1, ("replica",))])
def test_a_mesh_of_another_size_reads_the_saved_replicas(tmp_path, num_devices, spec):
    save_steps(tmp_path, mesh_of(4), [1], num_replicas=4)
    like = target(make_tree(mesh_of(num_devices)))
    with pytest.raises(ValueError, match=r"it has 4\).*residual/w: got float32\[4,2,3\], needed"):
        restore(tmp_path, like)
    old = with_rows(like, target(make_tree(mesh_of(4))), mesh_of(num_devices), ["replica"])
    got = restore(tmp_path, old)[0]
    residual = got["state"][0].residual["w"]
    np.testing.assert_array_equal(residual, make_tree(mesh_of(4), 1)["state"][0].residual["w"])
    want = NamedSharding(mesh_of(num_devices), PartitionSpec(*spec))
    assert residual.sharding.is_equivalent_to(want, 3)
    assert got["params"]["f32"].sharding.mesh.size == num_devices


def test_a_save_returns_early_and_its_buffers_may_be_donated(tmp_path, monkeypatch):
    mesh = mesh_of(4)
    overwritten = threading.Event()

    def last_of_the_save(directory):
        assert overwritten.wait(60)
        files.write_checksums(directory)

    monkeypatch.setattr(store, "write_checksums", last_of_the_save)
    values = np.random.default_rng(0).standard_normal((4, 500_000), np.float32)
    fresh = jax.jit(lambda a, b: (a + 0, b + 0))
    overwrite = jax.jit(lambda a, b: (-a, -b), donate_argnums=(0, 1))
    inputs = jax.device_put((values, values), (per_replica(mesh), replicated(mesh)))
    jax.block_until_ready(overwrite(*fresh(*inputs)))
    checkpoints = open_checkpoints(tmp_path)
    a, b = fresh(*inputs)
    like = target({"a": a, "b": b})
    checkpoints.save(1, {"a": a, "b": b}, {})
    for _ in range(3):
        a, b = overwrite(a, b)
    jax.block_until_ready((a, b))
    assert latest(tmp_path) is None
    overwritten.set()
    checkpoints.close()
    got = restore(tmp_path, like)[0]
    np.testing.assert_array_equal(got["a"], values)
    np.testing.assert_array_equal(got["b"], values)


def test_a_jump_of_the_clock_harms_no_save(tmp_path, monkeypatch):
    clock, jumps = time.time, []

    def jumped():
        if sys._getframe(1).f_code.co_name != "get_remaining_time":  # of Orbax
            return clock()
        jumps.append(3600)
        return clock() + 3600

    monkeypatch.setattr(time, "time", jumped)
    save_steps(tmp_path, mesh_of(2), [1])
    assert jumps and steps(tmp_path) == [1]


def test_the_newest_checkpoints_stay(tmp_path):
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step in (1, 2, 30, 4_000):
        checkpoints.save(step, {"x": jnp.ones(2)}, {})
    checkpoints.wait()
    assert steps(tmp_path) == [30, 4_000]
    checkpoints.close()
    checkpoints.close()
    assert latest(tmp_path) == 4_000
    assert latest(tmp_path / "nothing") is None


def test_a_process_killed_while_it_saves_leaves_the_previous_checkpoint(tmp_path):
    save_steps(tmp_path, mesh_of(2), [1])
    script = (
        "import sys, numpy as np\n"
        "from train.checkpoints.store import open_checkpoints\n"
        "checkpoints = open_checkpoints(sys.argv[1])\n"
        "noise = np.frombuffer(np.random.default_rng(0).bytes(2**27), np.uint8)\n"
        "checkpoints.save(2, {'x': noise}, {})\n"
        "checkpoints.wait()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    until(lambda: list(tmp_path.glob("2.*")))
    child.kill()
    child.wait()
    assert list(tmp_path.glob("2.*"))
    assert latest(tmp_path) == 1
    assert_same(restore(tmp_path, target(make_tree(mesh_of(2))))[0], make_tree(mesh_of(2), 1))
    open_checkpoints(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


HARM = [Path.unlink, lambda path: os.truncate(path, path.stat().st_size // 2), flip_a_bit]


def test_harm_to_any_file_is_noticed_and_the_last_good_step_named(tmp_path):
    save_steps(tmp_path, mesh_of(2), [10, 20])
    like = target(make_tree(mesh_of(2)))
    paths = [
        path.relative_to(tmp_path / "20")
        for item in ("state", "metadata", "checksums.json")
        for path in [tmp_path / "20" / item, *(tmp_path / "20" / item).rglob("*")]
        # Orbax adds its mark of completion after the checksums are made.
        if path.is_file() and path.name != "commit_success.txt"
    ]
    assert len(paths) > 5
    shutil.copytree(tmp_path / "20", tmp_path / "copy")
    for number, path in enumerate(paths):
        HARM[number % 3](tmp_path / "20" / path)
        with pytest.raises(ValueError, match="damaged") as error:
            restore(tmp_path, like)
        assert f"the checkpoint {tmp_path}/20 is damaged: " in str(error.value)
        assert path.name == "checksums.json" or path.name in str(error.value)
        assert f"Step 10 is good; to resume from it: rm -r {tmp_path}/20" in str(error.value)
        shutil.rmtree(tmp_path / "20")
        shutil.copytree(tmp_path / "copy", tmp_path / "20")
    assert restore(tmp_path, like)[2] == 20
    shutil.rmtree(tmp_path / "20" / "state")
    assert choose(tmp_path, item="metadata").metadata == {"step": 20}
    assert restore(tmp_path, like, step=10)[2] == 10
    shutil.rmtree(tmp_path / "10" / "state")
    with pytest.raises(ValueError, match="No other checkpoint there is good"):
        restore(tmp_path, like)


def test_checksums_name_all_files_and_no_others(tmp_path):
    save_steps(tmp_path, mesh_of(2), [10, 20])
    sums = tmp_path / "20" / "checksums.json"
    named = json.loads(sums.read_text())
    for name in named:  # such as one that lists fewer files than were saved
        sums.write_text(json.dumps({n: x for n, x in named.items() if n != name}))
        with pytest.raises(ValueError, match=f"{name} is not among the files that checksums.json"):
            files.intact(tmp_path)
    sums.write_text(json.dumps(named | {"../10/metadata/metadata": named["metadata/metadata"]}))
    with pytest.raises(ValueError, match=r"\.\./10/metadata/metadata is missing"):
        files.intact(tmp_path)
    sums.write_text(json.dumps(named))
    added = tmp_path / "20" / "state" / "added"
    for make in (added.touch, lambda: added.symlink_to("/none"), lambda: os.mkfifo(added)):
        make()
        with pytest.raises(ValueError, match="state/added is not among the files"):
            files.intact(tmp_path)
        added.unlink()
    instead = tmp_path / "20" / "metadata" / "metadata"
    instead.rename(tmp_path / "metadata")
    os.mkfifo(instead)
    with pytest.raises(ValueError, match="is damaged: .*/metadata is a FIFO; needs a file"):
        files.intact(tmp_path)
    (tmp_path / "metadata").rename(instead)
    assert choose(tmp_path, item="metadata").metadata == {"step": 20}


def test_only_folders_with_the_name_of_a_step_are_checkpoints(tmp_path):
    for name in ("8", "07", "8 ", "\u0663", "1" * 200, "-1", "9.orbax-checkpoint"):
        (tmp_path / name).mkdir()
    (tmp_path / "16").touch()
    assert files.steps(tmp_path) == [8]


def test_the_newest_checkpoint_is_chosen_again_if_a_run_removes_it_meanwhile(tmp_path, monkeypatch):
    save_steps(tmp_path, mesh_of(2), [10, 20])
    checksum = files._checksum

    def removed_meanwhile(path):
        if (tmp_path / "10").exists():
            shutil.copytree(tmp_path / "20", tmp_path / "30")
            shutil.rmtree(tmp_path / "10")
            shutil.rmtree(tmp_path / "20" / "state")
        return checksum(path)

    monkeypatch.setattr(files, "_checksum", removed_meanwhile)
    assert files.intact(tmp_path) == tmp_path / "30"
    with pytest.raises(ValueError, match="no checkpoint of step 10 in"):
        files.intact(tmp_path, 10)


@pytest.mark.parametrize("lost", ["state", "checksums.json", ""])
def test_what_was_read_of_a_checkpoint_that_went_meanwhile_is_not_used(tmp_path, monkeypatch, lost):
    save_steps(tmp_path, mesh_of(2), [10, 20])
    saved = store.choose(tmp_path, 10)
    like = target(make_tree(mesh_of(2)))
    params = store.restore_params(saved, like["params"])  # while it is there
    assert_same(params, make_tree(mesh_of(2), fill=10)["params"])
    path = tmp_path / "10" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for read in (
        lambda: store.load(saved, like),
        lambda: store.restore_params(saved, like["params"]),
        lambda: store.restore_leaves(saved, lambda name, leaf: None),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path}/10 was removed while it was read"):
            read()


def test_the_named_good_step_passes_over_damaged_ones(tmp_path):
    save_steps(tmp_path, mesh_of(2), [1, 2, 3])
    shutil.rmtree(tmp_path / "2" / "state")
    shutil.rmtree(tmp_path / "3" / "metadata")
    remedy = f"Step 1 is good; to resume from it: rm -r {tmp_path}/2 {tmp_path}/3"
    with pytest.raises(ValueError, match=remedy):
        choose(tmp_path, item="metadata")
    shutil.rmtree(tmp_path / "1" / "state")
    save_steps(tmp_path, mesh_of(2), [4])
    with pytest.raises(ValueError, match=f"{tmp_path}/2 is damaged.*Step 4 is good: name it"):
        restore(tmp_path, target(make_tree(mesh_of(2))), step=2)


def test_a_checkpoint_of_another_model_is_refused_before_loading(tmp_path, monkeypatch):
    save_steps(tmp_path, mesh_of(2), [1], num_replicas=2)
    monkeypatch.setattr(store.ocp, "Checkpointer", None)
    like = target(make_tree(mesh_of(2), width=6))
    like["params"]["other"] = like["params"].pop("one")
    like["params"]["bf16"] = like["params"]["f16"]
    with pytest.raises(ValueError, match="4 leaves differ") as error:
        restore(tmp_path, like)
    text = str(error.value)
    assert str(tmp_path / "1") in text
    assert "params/f32: got float32[3,5], needed float32[3,6]" in text
    assert "params/one: got float32[1,1], needed nothing" in text
    assert "params/other: got nothing, needed float32[1,1]" in text
    assert "params/bf16: got bfloat16[4], needed float16[2,2]" in text


def test_what_cannot_be_saved_or_found_is_told_at_once(tmp_path):
    for step, text in ((None, "no checkpoint in"), (5, "no checkpoint of step 5")):
        with pytest.raises(ValueError, match=rf"{text} .*\. Name another directory$"):
            restore(tmp_path, {}, step)
    save_steps(tmp_path, mesh_of(2), [5, 8])
    with pytest.raises(
        ValueError, match=r"step 6 .*only of steps \[5, 8\]\. Name one of these, or"
    ):
        restore(tmp_path, {}, 6)
    checkpoints = open_checkpoints(tmp_path)
    for step in (5, 6, 8):
        with pytest.raises(ValueError, match=rf"cannot save step {step}: .* steps \[.*8\]"):
            checkpoints.save(step, {"x": jnp.ones(1)}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(9, {"x": jnp.ones(1)}, {"path": tmp_path})
    checkpoints.close()
    assert steps(tmp_path) == [5, 8]
    with pytest.raises(ValueError, match="keep is 0.*Write keep=1"):
        open_checkpoints(tmp_path, keep=0)


def test_a_directory_that_cannot_be_written_is_named_and_read(small_disk):
    (small_disk / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(OSError, match=f"cannot write checkpoints to {small_disk}/{name}: .*Na"):
            open_checkpoints(small_disk / name)
    tree = {"x": np.arange(3)}
    checkpoints = open_checkpoints(small_disk)
    checkpoints.save(1, tree, {"a": 1})
    checkpoints.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_same(restore(small_disk, tree)[0], tree)
    with pytest.raises(OSError, match=f"cannot write checkpoints to {small_disk}: Read-only"):
        open_checkpoints(small_disk)


def test_too_little_space_is_refused_before_writing(tmp_path, monkeypatch):
    save_steps(tmp_path, mesh_of(2), [1])
    usage = namedtuple("usage", "total used free")(4_000_000, 3_000_000, 1_000_000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    checkpoints = open_checkpoints(tmp_path)
    with pytest.raises(OSError, match="no space") as error:
        checkpoints.save(2, {"x": jnp.ones(250_001)}, {})
    assert error.value.errno == errno.ENOSPC
    text = str(error.value)
    assert f"{tmp_path}: it needs about 1,000,004 bytes, 1,000,000 are free" in text
    assert "The checkpoint of step 1 is complete. Free some space there" in text
    checkpoints.save(2, {"x": jnp.ones(250_000)}, {})
    checkpoints.close()
    assert steps(tmp_path) == [1, 2]


def test_a_disk_that_fills_up_while_saving_keeps_what_was_saved(small_disk, monkeypatch):
    usage = namedtuple("usage", "total used free")(0, 0, 10**9)
    noise = np.random.default_rng(0).standard_normal(400_000, np.float32)
    half = noise[:200_000]
    checkpoints = open_checkpoints(small_disk)
    checkpoints.save(1, {"x": half}, {})
    checkpoints.wait()
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage)
    # One array: with two that fail, Orbax may print that its event loop was closed too early.
    checkpoints.save(2, {"x": noise}, {})
    with pytest.raises(OSError, match="needs about 1,600,000 bytes") as error:
        checkpoints.wait()
    assert error.value.errno == errno.ENOSPC
    assert str(small_disk) in str(error.value)
    assert "The checkpoint of step 1 is complete" in str(error.value)
    assert [path.name for path in small_disk.iterdir()] == ["1"]
    np.testing.assert_array_equal(restore(small_disk, {"x": half})[0]["x"], half)
    checkpoints.save(3, {"x": noise[:100]}, {})
    checkpoints.close()
    assert steps(small_disk) == [1, 3]
    assert_same(restore(small_disk, {"x": noise[:100]})[0], {"x": noise[:100]})


@pytest.mark.parametrize("surfaces", ["save", "wait", "close"])
def test_an_error_in_the_background_surfaces_once(tmp_path, monkeypatch, surfaces):
    tree = {"x": jnp.ones(3)}
    checkpoints = open_checkpoints(tmp_path, keep=1)
    checkpoints.save(1, tree, {})
    checkpoints.wait()

    def broken(directory):
        raise OSError(errno.EIO, "the cable is out")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_checksums", broken)
        checkpoints.save(2, tree, {})
        with pytest.raises(OSError, match="could not save.*the cable is out.*step 1 is complete"):
            checkpoints.save(3, tree, {}) if surfaces == "save" else getattr(
                checkpoints, surfaces
            )()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    if surfaces != "close":
        checkpoints.save(4, tree, {})
        checkpoints.close()
        assert steps(tmp_path) == [4]
