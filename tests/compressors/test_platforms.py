"""Which form of a function is traced, and which one runs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomp.compressors.platforms import by_platform, fuses_rows
from tests.helpers.replicas import mesh_of


@pytest.fixture
def chosen():
    """A function of forms, each of which adds another number, and the names of those traced."""
    traced = []

    def form(name, number):
        return lambda x: (traced.append(name), x + number)[1]

    forms = {"cpu": form("cpu", 1), "gpu": form("gpu", 2), "default": form("default", 3)}
    return lambda x: by_platform(x, **forms), traced


def test_a_mesh_says_which_form_is_traced(chosen):
    function, traced = chosen
    run = jax.shard_map(function, mesh=mesh_of(2), in_specs=P(), out_specs=P())
    assert jax.eval_shape(run, jnp.zeros(2)).shape == (2,)
    assert traced == ["cpu"]


@pytest.mark.parametrize(("platform", "form"), [("gpu", "gpu"), ("tpu", "default")])
def test_meshes_of_accelerators_have_forms_of_their_own(chosen, platform, form, monkeypatch):
    function, traced = chosen
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(platform=platform))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    function(0)
    assert traced == [form]


def test_without_a_mesh_the_compiler_takes_its_own(chosen):
    function, traced = chosen
    assert jax.jit(function)(jnp.float32(0)) == 1
    assert sorted(traced) == ["cpu", "default", "gpu"]


@pytest.mark.parametrize(
    ("kind", "fuses"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100-SXM4-40GB", True),
        ("NVIDIA GeForce RTX 4090", True),
        ("NVIDIA L4", True),
        ("Tesla T4", False),
        ("Tesla V100-SXM2-16GB", False),
        ("NVIDIA T4", False),
        ("NVIDIA GeForce RTX 2080 Ti", False),
        ("AMD Instinct MI300X", False),
    ],
)
def test_rows_are_fused_from_ampere_on(kind, fuses, monkeypatch):
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert fuses_rows() is fuses
