"""The wheel: what is in it, and that it works where there is no checkout."""

import importlib.metadata
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

STEP = """
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxcomp

assert jaxcomp.__file__.startswith(f"{sys.prefix}/lib"), jaxcomp.__file__
assert importlib.util.find_spec("train") is importlib.util.find_spec("configs") is None
mesh = jax.make_mesh((2,), ("replica",))
mean = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
loss_fn = lambda w, batch: jnp.mean((batch @ w - batch) ** 2)
init, step = jaxcomp.train_step(loss_fn, optax.chain(mean, optax.sgd(0.5)), mesh, "replica")
w = jax.device_put(jnp.zeros((64, 64)), NamedSharding(mesh, P()))
batch = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
before = loss_fn(w, batch)
w, _, metrics = step(w, init(w), jax.device_put(batch, NamedSharding(mesh, P("replica"))))
assert not metrics["skipped"]
assert loss_fn(jax.device_get(w), batch) < before
print(jaxcomp.__version__)
"""


def run(*command, **variables) -> str:
    """Runs a command that must succeed, away from the checkout; returns what it says."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # `python -m` looks for packages in its working directory first.
    done = subprocess.run(
        [str(part) for part in command],
        cwd=sys.prefix,
        env=environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Builds the source archive, and the wheel of that, without a network.

    setuptools writes into the folder that it builds: two suites may share the checkout.
    """
    folder = tmp_path_factory.mktemp("wheel")
    others = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, folder / "checkout", ignore=others)
    run(sys.executable, "-m", "build", "-n", "-o", folder / "dist", folder / "checkout")
    (archive,) = (folder / "dist").glob("*.tar.gz")
    (found,) = (folder / "dist").glob("*.whl")
    assert archive.name == f"jaxcomp-{VERSION}.tar.gz"
    return found


def test_it_holds_the_library_alone(wheel):
    package = ROOT / "jaxcomp"
    ours = {f"jaxcomp/{file.relative_to(package).as_posix()}" for file in package.rglob("*.py")}
    ours |= {f"jaxcomp/launch/{name}" for name in ("jobset.yaml", "mpirun.sh", "slurm.sbatch")}
    about = f"jaxcomp-{VERSION}.dist-info"
    named = ("METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE")
    expected = ours | {"jaxcomp/py.typed"} | {f"{about}/{name}" for name in named}
    assert set(zipfile.ZipFile(wheel).namelist()) == expected


def test_it_trains_in_an_environment_of_its_own(wheel, tmp_path):
    """All but jaxcomp is the running environment's, whose editable jaxcomp is not seen."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    # Finders of editable packages are made by .pth files, which are not read in this folder.
    (site,) = home.glob("lib/*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "8"}
    assert run(python, "-I", "-c", STEP, **variables) == f"{VERSION}\n"
    assert run(*pip, "check") == "No broken requirements found.\n"


def test_the_version_is_the_metadata_s_or_that_of_a_checkout(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    version = lambda: runpy.run_path(str(ROOT / "jaxcomp" / "__init__.py"))["__version__"]
    monkeypatch.setattr(importlib.metadata, "version", {"jaxcomp": "1.2.3"}.get)
    assert version() == "1.2.3"
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert version() == "0+checkout"
