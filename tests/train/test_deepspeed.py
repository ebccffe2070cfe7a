"""DeepSpeed's configurations become ones of ours, key by key, and mean the same."""

import ast
import json
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.launching import ROOT
from train import deepspeed
from train.config import expression
from train.config import run as configs
from train.config.optimizer import schedule

# As in DeepSpeed's tutorials on 0/1 Adam and 1-bit Adam.
ZERO_ONE = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "steps_per_print": 100,
    "optimizer": {
        "type": "ZeroOneAdam",
        "params": {
            "lr": 1e-3,
            "weight_decay": 0.01,
            "bias_correction": False,
            "var_freeze_step": 1000,
            "var_update_scaler": 16,
            "local_step_scaler": 1000,
            "local_step_clipper": 16,
            "cuda_aware": False,
            "comm_backend_name": "nccl",
        },
    },
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
}
ONE_BIT = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 4,
    "optimizer": {
        "type": "OneBitAdam",
        "params": {
            "lr": 4e-4,
            "betas": [0.9, 0.95],
            "freeze_step": 23_000,
            "cuda_aware": False,
            "comm_backend_name": "nccl",
        },
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 50}},
    "fp16": {"enabled": True},
}


def written(found, tmp_path):
    file = tmp_path / "ds_config.py"
    file.write_text(deepspeed.to_python(found, "mine"))
    return configs.load(str(file)), file.read_text()


def test_zero_one_adam_of_the_tutorial(tmp_path):
    config, text = written(deepspeed.translate(ZERO_ONE, 125_000), tmp_path)
    assert (config.steps, config.data.batch, config.replicas, config.accumulate) == (
        *(125_000, 4096, 256, 1),
    )
    assert (config.optimizer.learning_rate, config.optimizer.schedule) == (1e-3, "constant")
    assert config.model.dtype == "bfloat16" and config.log_every == 100
    assert config.optimizer.update == (
        "chain(jaxcomp.clip_by_global_norm(1.0), zero_one_adam(learning_rate, axis_name, "
        "variance_at=schedules.growing(16, until=1000), "
        "sync_at=schedules.halving(exponential_decay(1.0, 1000, 0.5, 1000), steps, longest=16, "
        "after=1000), b1=0.9, b2=0.999, eps=1e-08, deviations=Deviations(bias_correction=False), "
        "weight_decay=0.01))"
    )
    assert configs.update(config).init is not None
    left = re.findall(r"^# left out: (\w+):", text, re.MULTILINE)
    assert left == ["bias_correction", "comm_backend_name", "cuda_aware", "fp16"]
    assert "# left out: the effect of weight_decay through DeepSpeed's momentum" in text


def test_one_bit_adam_of_the_tutorial(tmp_path):
    config, _ = written(deepspeed.translate(ONE_BIT, 100), tmp_path)
    assert (config.data.batch, config.replicas, config.accumulate) == (4096, 64, 4)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (2e-4, 50)
    assert optimizer.update == (
        "one_bit_adam(learning_rate, axis_name, freeze_step=23000, b1=0.9, b2=0.95, eps=1e-08, "
        "deviations=Deviations(bias_correction=False), weight_decay=0.0)"
    )
    assert configs.update(config).init is not None


def test_a_decaying_schedule_ends_at_zero(tmp_path):
    # Its rate is its own, and 1e-3 by default: DeepSpeed never takes the optimizer's.
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 20}}
    config, _ = written(deepspeed.translate(ONE_BIT | {"scheduler": scheduler}, 100), tmp_path)
    rate = schedule(config.optimizer, config.steps)
    assert [float(rate(step)) for step in (0, 20, 100)] == pytest.approx([0.0, 1e-3, 0.0])


def test_replicas_meet_as_often_as_those_of_deepspeed_did():
    trace = np.load(ROOT / "tests" / "golden" / "zero_one_adam.npz")
    params = json.loads(str(trace["meta_json"]))["config"]
    found = deepspeed.translate({"optimizer": {"type": "ZeroOneAdam", "params": params}}, 27)
    call = expression.parse(found.optimizer["update"])
    (sync_at,) = [word.value for word in call.keywords if word.arg == "sync_at"]
    schedule = expression.evaluate(ast.unparse(sync_at), {"steps": 28})
    met = np.all(trace["u_w1"] == 0, axis=(1, 2, 3))[1:]  # its first step is dropped
    # Ours meet at multiples of the interval, theirs count from the last time that it grew.
    ours = np.asarray(schedule(jnp.arange(27)))
    assert np.abs(np.cumsum(ours) - np.cumsum(met)).max() <= 1


def test_every_key_that_is_left_out_is_on_the_page():
    page = (ROOT / "docs" / "from_deepspeed.md").read_text()
    keys = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", page, re.MULTILINE))))
    assert set(deepspeed.DROPPED) <= keys
    for name in (ZERO_ONE, ONE_BIT):
        assert {*name, *name["optimizer"]["params"]} - {"optimizer", "scheduler"} <= keys


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb'; needs one of OneBitAdam"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type is 'OneCycle'"),
        ({"gradient_accumulation_steps": 5}, "no multiple of 16 x 5"),
        ({"train_batch_size": "auto"}, '"auto" stands for what Hugging Face fills in'),
        ({"optimizer": None}, "optimizer.type is None"),
    ],
)
def test_what_has_no_counterpart_or_says_nothing_definite_is_refused(change, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        deepspeed.translate(ZERO_ONE | change, 10)


def test_nothing_is_dropped_without_a_note(tmp_path):
    params = {"warmup_min_lr": 0, "warmup_num_steps": 5}
    optimizer = {"type": "OneBitAdam", "params": {"freeze_step": 10}}
    given = {"optimizer": optimizer, "scheduler": {"type": "WarmupLR", "params": params}}
    given |= {"train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": False}, "bf16": None}
    config, text = written(deepspeed.translate(given, 100), tmp_path)
    left = re.findall(r"^# left out: (\w+):", text, re.MULTILINE)
    assert left == ["train_micro_batch_size_per_gpu", "warmup_min_lr", "warmup_type"]
    assert config.model.dtype == "float32"
    params["warmup_type"] = "linear"
    assert not any("warmup_type" in note for note in deepspeed.translate(given, 100).notes)


def test_the_command_prints_a_config_file(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(ONE_BIT))
    command = [sys.executable, "-m", "train.deepspeed", str(tmp_path / "ds.json")]
    done = subprocess.run([*command, "--steps", "100"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.py").write_text(done.stdout)
    assert configs.load(str(tmp_path / "mine.py")).name == "ds"
    (tmp_path / "ds.json").write_text("{")
    done = subprocess.run([*command, "--steps", "100"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


HOSTILE = "__import__('os').system('id')"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(HOSTILE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PARAMS = [*ZERO_ONE["optimizer"]["params"], *ONE_BIT["optimizer"]["params"], "eps"]
KEYS = [*ZERO_ONE, *ONE_BIT, "gradient_accumulation_steps", "bf16", "zero_optimization", HOSTILE]


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.sampled_from(["ZeroOneAdam", "OneBitAdam"]),
    st.dictionaries(st.sampled_from(PARAMS) | st.text(), JSON, max_size=4),
    st.dictionaries(st.sampled_from(KEYS) | st.text(), JSON, max_size=4),
)
def test_no_json_makes_a_file_that_does_more_than_its_config(kind, params, more):
    config = more | {"optimizer": {"type": kind, "params": params}}
    try:
        found = deepspeed.translate(json.loads(json.dumps(config)), 10)
    except ValueError:
        return
    tree = ast.parse(deepspeed.to_python(found, "mine\nimport os"))
    assert [type(node) for node in tree.body[1:]] == [
        ast.ImportFrom,
        ast.ImportFrom,
        ast.FunctionDef,
    ]
    calls = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert sorted(calls) == ["Config", "Data", "DecoderConfig", "Optimizer"]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names == {"Config", "Data", "DecoderConfig", "Optimizer"}
    names = dict.fromkeys(("learning_rate", "axis_name", "steps"))
    expression.check(found.optimizer["update"], names)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("freeze_step", HOSTILE),
        ("betas", [0.9, HOSTILE]),
        ("betas", 0.9),
        ("eps", float("nan")),
        ("lr", 10**400),
        ("weight_decay", True),
        ("freeze_step", 2.5),
    ],
)
def test_a_value_that_is_no_number_is_refused(key, value):
    config = {"optimizer": {"type": "OneBitAdam", "params": {key: value}}}
    with pytest.raises(ValueError, match=f"{key} is .*; needs"):
        deepspeed.translate(config, 10)


def test_a_key_stays_in_its_comment(tmp_path):
    key = "x\nimport os; os.system('id')\n#"
    found = deepspeed.translate({key: 1, "made_up": 1} | ONE_BIT, 100)
    _, text = written(found, tmp_path)
    assert "# left out: made_up: not known, left out" in text
    assert "# left out: " + json.dumps(key) + ": not known" in text
