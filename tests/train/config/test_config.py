"""Configurations: overrides, what is refused, and optimizers as text."""

import dataclasses
import functools
import importlib
import json
import pathlib
import pkgutil
import sys

import optax
import pytest

import jaxcomp
from train.config import Config, Data, Images, Optimizer, expression, facts
from train.config import run as configs
from train.models.decoder import DecoderConfig
from train.models.resnet import ResNetConfig
from train.models.swin import SwinConfig
from train.models.vit import ViTConfig

UPDATE = "chain(clip_by_global_norm(1.0), adamw(learning_rate))"

FILE = f'''"""The lab book of this run."""
from train.config import Config, Optimizer


def get_config():
    return Config(name="small", steps=100, optimizer=Optimizer("{UPDATE}", 1e-3, 10))
'''


IMAGES = """from train.config import Config, Images, Optimizer
from train.models.resnet import ResNetConfig


def get_config():
    optimizer = Optimizer("sgd(learning_rate)", 1e-3)
    model = ResNetConfig(size=8)
    return Config("images", 100, optimizer, objective="classify", model=model, data=Images())
"""


def config_of(**changes):
    optimizer = Optimizer(UPDATE, 1e-3, 10)
    return Config(**{"name": "small", "steps": 100, "optimizer": optimizer} | changes)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(FILE)
    return str(path)


def test_file_without_overrides_is_what_get_config_returns(file):
    assert configs.load(file) == config_of()


def test_overrides_are_typed_and_reach_nested_fields(file):
    args = "--steps 200 --optimizer.learning-rate 3e-4 --data.path text --model.width=64"
    args = [*args.split(), "--optimizer.update", "sgd(learning_rate)", "--no-resume"]
    expected = config_of(
        steps=200,
        resume=False,
        optimizer=Optimizer("sgd(learning_rate)", 3e-4, 10),
        data=Data(path="text"),
        model=DecoderConfig(width=64),
    )
    assert configs.load(file, args) == expected


def test_help_tells_every_field_and_the_lab_book(file, capsys):
    with pytest.raises(SystemExit) as stop:
        configs.load(file, ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "The lab book of this run." in text
    for kind, prefix in ((Config, ""), (Data, "data."), (Optimizer, "optimizer.")):
        for field in dataclasses.fields(kind):
            if field.name not in ("model", "data", "optimizer"):
                assert f"--{prefix}{field.name.replace('_', '-')}" in text
    assert "Optimizer steps to train for." in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--step 3", "--steps"),
        ("--optimizer.learning_rte 3", "--optimizer.learning-rate"),
        ("--learning-rate 3", "--optimizer.learning-rate"),
        ("--data.bach 3", "--data.batch"),
        ("--steps many", "invalid literal"),
        ("--steps 1.5", "invalid literal"),
        ("--optimizer.schedule cosin", "cosine"),
        ("--steps 0", "write --steps 1"),
        ("--optimizer.update adamw(learning_rte)", "learning_rate"),
    ],
)
def test_wrong_override_is_refused_with_the_right_one_named(file, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        configs.load(file, args.split())
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_missing_file_is_refused_with_those_that_exist(file):
    wrong = str(pathlib.Path(file).with_name("smal.py"))
    with pytest.raises(ValueError, match=r"smal.py' is no config file; write one of .*small.py"):
        configs.load(wrong)
    with pytest.raises(ValueError, match="no config file"):
        configs.load(str(pathlib.Path(file).parent))


def test_a_config_file_may_have_dataclasses_of_its_own(file, tmp_path):
    path, own = tmp_path / "own sizes.py", "class Size:\n    width: int = 64\n"
    first = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\n"
    path.write_text(first + own + pathlib.Path(file).read_text())
    assert configs.load(str(path)) == config_of()


def test_a_config_file_may_import_modules_beside_it(file, tmp_path, monkeypatch):
    (tmp_path / "helper_of_a_config.py").write_text("STEPS = 12\n")
    path, before = tmp_path / "with_helper.py", list(sys.path)
    text = pathlib.Path(file).read_text().replace("=100,", "=helper.STEPS,")
    path.write_text(f"import helper_of_a_config as helper\n{text}")
    monkeypatch.chdir(tmp_path)
    assert configs.load("with_helper.py").steps == configs.load(str(path)).steps == 12
    assert sys.path == before


@pytest.mark.parametrize("text", ["", "def get_config():\n    return {'steps': 3}\n"])
def test_file_without_a_config_is_refused(tmp_path, text):
    path = tmp_path / "empty.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"empty.py' has no get_config\(\) that returns"):
        configs.load(str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (functools.partial(config_of, **{name: 0}), f"{name}=0 must be at least 1")
            for name in "steps accumulate eval_every eval_batches checksum_every log_every".split()
        ),
        (lambda: config_of(checkpoint_every=0), "write --checkpoint-every 1"),
        (lambda: config_of(replicas=-1), "replicas=-1 must be at least 0"),
        (lambda: config_of(seed=-1), r"seed=-1 must be in \[0, 2\^32\)"),
        (lambda: config_of(name=""), "name='' must be a folder below"),
        (lambda: config_of(name="../up"), "must be a folder below"),
        (lambda: config_of(name="a\nb"), r"name='a\\nb' must be one printable line"),
        (lambda: config_of(name="a\x1b[2J"), "must be one printable line"),
        (lambda: config_of(link_rate=0.0), "link_rate=0.0 must be positive; write 500e6"),
        (lambda: config_of(model=DecoderConfig(vocab=255)), "vocab=255 must be at least 256"),
        (
            lambda: config_of(model=ViTConfig()),
            r"'next_token' cannot .*; write model=DecoderConfig",
        ),
        (lambda: config_of(data=Images()), r"cannot use data=Images.*; write data=Data\("),
        (lambda: config_of(objective="classify"), r"write model=ResNetConfig\(...\) or ViTConfig"),
        (lambda: Images(batch=0), "data.batch=0 must be at least 1"),
        (lambda: SwinConfig(width=6), "model.width=6 must be divisible by model.heads=4"),
        (lambda: SwinConfig(blocks=(2, 0)), r"model.blocks=\(2, 0\) must be"),
        (lambda: SwinConfig(window=0), "model.window=0 must be at least 1"),
        (lambda: SwinConfig(size=256), "model.size=256 must be cut .* write --model.size 224"),
        (lambda: ViTConfig(width=6), "model.width=6 must be divisible by model.heads=4"),
        (lambda: ViTConfig(patch=3), "model.size=8 must be divisible by model.patch=3"),
        (lambda: ViTConfig(classes=0), "model.classes=0 must be at least 1"),
        (lambda: ResNetConfig(width=6), "divisible by 4, .* write --model.width 8"),
        (lambda: ResNetConfig(size=0), "model.size=0 must be at least 1"),
        (lambda: config_of(replicas=3), r"32 must be .* 3 replicas .* write --data.batch 33"),
        (lambda: config_of(accumulate=3), r"accumulate=3 = 12; write --data.batch 36"),
        (lambda: Data(batch=0), "data.batch=0 must be at least 1"),
        (lambda: Data(validation_fraction=0.0), "validation_fraction=0.0 must be between"),
        (lambda: Data(path="a", huggingface="b"), "exclude each other"),
        (lambda: Data(path=""), "data.path='' names nothing; write --data.path FOLDER"),
    ],
)
def test_wrong_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (2, 1), (9, 1), (60, 6), (100, 10), (101, 100)]
)
def test_a_warmup_that_does_not_fit_is_a_tenth_of_the_steps(steps, warmup):
    optimizer = Optimizer(UPDATE, 1e-3, warmup_steps=100)
    assert Config("short", steps, optimizer).optimizer.warmup_steps == warmup


def test_replicas_0_leaves_the_division_of_the_batch_to_the_machine():
    config = config_of(replicas=0, accumulate=2)
    assert configs.microbatch(config.data.batch, 8, config.accumulate) == 2
    with pytest.raises(ValueError, match="5 replicas x accumulate=2 = 10"):
        configs.microbatch(config.data.batch, 5, config.accumulate)


def test_json_has_every_field_and_no_type_of_the_first_kinds():
    config = config_of(data=Data(path="text"), model=DecoderConfig(width=64), replicas=0)
    assert json.loads(facts.to_json(config)) == dataclasses.asdict(config)


def test_model_and_data_of_another_type_are_overridden_and_named_in_json(tmp_path):
    path = tmp_path / "images.py"
    path.write_text(IMAGES)
    config = configs.load(str(path), "--model.blocks 3 4 --data.form folder --data.path x".split())
    assert config.model == ResNetConfig(blocks=(3, 4), size=8)
    assert config.data == Images("folder", "x")
    record = json.loads(facts.to_json(config))
    assert record["model"].pop("type") == "ResNetConfig" and record["model"]["blocks"] == [3, 4]
    assert record["data"] == {"type": "Images"} | dataclasses.asdict(config.data)
    assert ResNetConfig(**record["model"] | {"blocks": (3, 4)}) == config.model


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("f(1, -2.5, x='a')", ((1, -2.5), {"x": "a"})),
        ("  f((1, 2), [x], None)\n", (((1, 2), [7], None), {})),
        ("f(True, y=False)", ((True,), {"y": False})),
        ("f(\n  f(),\n)", ((((), {}),), {})),
        ("f(1/64, x=-x / 2)", ((1 / 64,), {"x": -3.5})),
        ("optax.adamw", optax.adamw),
        ("sgd", 3),  # bindings hide names of optax
        ("contrib.schedule_free", optax.contrib.schedule_free),
    ],
)
def test_expression_has_the_value_that_python_gives(text, value):
    bindings = {"f": lambda *args, **kwargs: (args, kwargs), "x": 7, "sgd": 3}
    assert expression.evaluate(text, bindings) == value


def test_every_method_has_a_name_in_configs():
    names = [module.name for module in pkgutil.iter_modules(jaxcomp.methods.__path__)]
    methods = {}
    for name in names:
        module = importlib.import_module(f"jaxcomp.methods.{name}")
        if hasattr(module, name):
            methods[name] = getattr(module, name)
    assert {"slamb", "zero_one_adam"} <= set(methods)
    for name, method in methods.items():
        for text in (name, f"jaxcomp.{name}"):
            assert expression.evaluate(text, {}) is method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adamw(1e-3", r"'adamw\(1e-3' is not an expression"),
        ("", "'' is not an expression"),
        ("adam_w(1e-3)", "'adam_w' is not a name of jaxcomp or optax; write .*adamw"),
        ("zzzzqqqq()", "see the README"),
        ("optax.adam_w(1e-3)", "'optax.adam_w' does not exist; write .*adamw"),
        ("optax.__doc__", "does not exist"),
        ("__import__('os')", "not a name"),
        ("adamw.__globals__", "only modules have names inside"),
        ("jaxcomp.planner.dataclasses.inspect.os.system('id')", "'jaxcomp.planner' does not exist"),
        ("optax.contrib.jnp", "does not exist"),
        ("jaxcomp.schedules.np", "does not exist"),
        ("report", "not a name"),
        ("[" * 60_000, "is not an expression"),
        ("-" * 200 + "1", "nests 20. deep; needs at most 50"),
        ("adamw('\0')", "is not an expression"),
        ("adamw(*[1])", "holds Starred"),
        ("adamw(**{'a': 1})", r"holds"),
        ("chain(**x)", r"holds \*\*"),
        ("1 + 1", "holds Add"),
        ("lambda: 1", "holds Lambda"),
        ("[x for x in y]", "holds ListComp"),
    ],
)
def test_expression_that_is_wrong_is_refused_before_anything_is_called(text, message):
    with pytest.raises(ValueError, match=message):
        expression.check(text, {})
    with pytest.raises(ValueError, match=message):
        expression.evaluate(text, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chain(adam)", r"chain\(adam\) cannot be called like this: .*'init'"),
        ("adamw(0.1, weight_decy=1.0)", r"adamw\(0.1, weight_decy=1.0\) cannot .*weight_decy"),
        ("scale(-learning_rate)", "only numbers are divided or have a sign; a schedule"),
        ("scale(learning_rate / 2)", "only numbers are divided"),
        ("top_k(1 / 0)", "'1 / 0': division by zero"),
    ],
)
def test_what_is_no_transformation_or_number_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        expression.evaluate(text, {"learning_rate": optax.constant_schedule(0.1)})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return Config(stepz=3)", r"line 3: TypeError: .*'stepz'"),
        ("return Config(", r"line \d: SyntaxError: "),
        ("return missing", r"line 3: NameError: name 'missing'"),
        ("return 1 / 0", r"line 3: ZeroDivisionError: division by zero\.$"),
        ("return int('1e3')", r"line 3: invalid literal .*'1e3'\.$"),
        ("return open('/no/file')", r"line 3: FileNotFoundError: .*'/no/file'\.$"),
        (
            "return dataclasses.replace(Optimizer('adam(0.1)', 0.1), stepz=3)",
            r"line 3: .*'stepz'",
        ),
        ("import broken", r"slip.py', line 3: SyntaxError: .*broken.py, line 2"),
        ("return 1\nget_config = 3", r"slip.py': TypeError: 'int' object is not callable"),
    ],
)
def test_a_slip_in_a_config_file_is_told_with_its_line(tmp_path, monkeypatch, body, message):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken.py").write_text("a = 1\ndef (\n")
    path, names = tmp_path / "slip.py", "Config, Optimizer; import dataclasses"
    path.write_text(f"from train.config import {names}\ndef get_config():\n    {body}\n")
    with pytest.raises(ValueError, match=message):
        configs.load(str(path))
