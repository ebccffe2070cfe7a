"""MaxText's model and loss in the step for nnx, by the page's recipe, where it is installed."""

import pathlib
import re
import textwrap

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import jaxcomp.flax
from tests.helpers.snippets import ROOT

maxtext = pytest.importorskip("maxtext")
TINY = """
run_name=tiny enable_checkpointing=false dataset_type=synthetic hardware=cpu dtype=float32
skip_jax_distributed_system=true attention=dot_product base_emb_dim=64 base_num_query_heads=4
base_num_kv_heads=4 base_mlp_dim=128 base_num_decoder_layers=2 head_dim=16 vocab_size=256
max_target_length=32 per_device_batch_size=2
"""


def recipe():
    page = (ROOT / "docs" / "others.md").read_text()
    (rules,) = re.findall("`(override_logical_axis_rules.*?)`", page)
    (code,) = re.findall(r"\n\n((?:    .*\n)*    model = maxtext.*\n(?:    .*\n)*)", page)
    return rules.split(), textwrap.dedent(code)


def batch_of(step):
    """Tokens that grow by three."""
    start = np.random.default_rng(step).integers(0, 256, size=(8, 1))
    tokens = ((start + 3 * np.arange(33)) % 256).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    places = np.broadcast_to(np.arange(32, dtype=np.int32), (8, 32))
    for name in ("inputs", "targets"):
        batch |= {f"{name}_position": places, f"{name}_segmentation": np.ones_like(places)}
    return batch


@pytest.fixture(autouse=True)
def readers_jax():
    """A reader's JAX is not as strict as the tests'."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.filterwarnings("ignore")
def test_its_model_learns_and_sends_codes_alone(tmp_path):
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train.train import loss_fn

    rules, code = recipe()
    base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
    options = [*TINY.split(), f"base_output_directory={tmp_path}", *rules]
    config = pyconfig.initialize(["", str(base), *options])
    tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "data"), optax.adamw(1e-2))
    names = {"jax": jax, "nnx": nnx, "jaxcomp": jaxcomp, "maxtext": maxtext, "Mesh": Mesh}
    names |= {"AxisType": AxisType, "config": config, "tx": tx, "loss_fn": loss_fn}
    exec(code, names)
    step, model, optimizer = names["step"], names["model"], names["optimizer"]
    losses = [step(model, optimizer, batch_of(i))["loss"].mean() for i in range(20)]
    assert losses[-1] < 0.2 * losses[0]
    program = step.lower(model, optimizer, batch_of(0)).compile()
    numel = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    sent = sum(row.sent_bytes for row in jaxcomp.report.collectives(program, names["mesh"]))
    assert 0.5 * numel < sent < 1.1 * numel  # 4 bits both ways; norms in float32
