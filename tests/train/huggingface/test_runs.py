"""Runs that begin with a Hugging Face folder, and end as one."""

import dataclasses
import json
import pathlib
import re
import resource
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers import faults, tokens
from tests.train.huggingface.test_folder import GOLDEN, loaded
from train import export, loop, resume
from train.checkpoints import mean, store
from train.config import Config, Data, Optimizer
from train.config import run as configs
from train.huggingface import folder, safetensors, settings
from train.huggingface.pretrained import Pretrained, tokenizer_of
from train.models import lora, modules
from train.models.decoder import Decoder, DecoderConfig
from train.models.resnet import ResNetConfig
from train.placement import build

pytestmark = pytest.mark.usefixtures("undrawn")

UPDATE = "local_steps(adam(learning_rate), axis_name, every=4)"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A run of two steps from GPT-2's folder, whose replicas end apart from each other.

    It is in the default `runs_dir`, which is relative.
    """
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again\n" * 40)
    return Config(
        name="tuned",
        steps=2,
        optimizer=Optimizer(UPDATE, 1e-3),
        replicas=2,
        eval_batches=1,
        per_layer=False,
        start_from=str(GOLDEN / "gpt2"),
        model=Pretrained(context=8, dtype="float32"),
        data=Data(path=str(text), batch=4),
    )


def test_a_run_from_a_folder_is_exported_as_one(config, tmp_path, capsys, monkeypatch):
    assert isinstance(config.model, DecoderConfig) and config.model.positions == 16
    task = loop.make_task(config)
    monkeypatch.setattr(loop, "make_task", lambda config: task)
    rows = loop.run(config)
    run, to = pathlib.Path(config.runs_dir, "tuned"), tmp_path / "exported"
    export.main([str(run), str(to)])
    assert f"{to} holds the model of {run}" in capsys.readouterr().out
    _, params, _ = loaded(to, scan=True, context=8)
    # Evaluated as the run has: what its replicas have learned since they met is in it.
    loss = task.evaluate(jax.tree.map(np.asarray, params))["loss"]
    assert float(loss) == pytest.approx(rows[-1]["val_loss"], rel=1e-6)
    assert rows[-1]["val_loss"] != rows[0]["val_loss"]
    first = loaded(GOLDEN / "gpt2", scan=True)[1]
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), first, params)
    assert all(jax.tree.leaves(changed["blocks"]))
    there, here = (json.loads((path / "config.json").read_text()) for path in (GOLDEN / "gpt2", to))
    assert here == there
    tokenizer = "tokenizer.json"
    assert (to / tokenizer).read_bytes() == (GOLDEN / "gpt2" / tokenizer).read_bytes()
    # A run from that run knows where it all began; half as many bytes hold the nearest values.
    again = dataclasses.replace(config, name="again", start_from=str(run))
    assert export.origin(again.start_from) == GOLDEN / "gpt2"
    export.main([str(run), str(tmp_path / "half"), "--dtype", "bfloat16"])
    half = safetensors.read_all(tmp_path / "half")
    for name, array in safetensors.read_all(to).items():
        np.testing.assert_array_equal(array.astype(half[name].dtype), half[name], strict=True)


def test_lora_begins_with_a_folder_and_ends_as_one(config, tmp_path):
    model = dataclasses.replace(config.model, lora=2)
    config = dataclasses.replace(config, model=model, trainable=lora.TRAINED)
    mesh = jax.make_mesh((2,), ("replica",))
    natural, everywhere = build.param_shapes(config), NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda _: everywhere, natural)
    task = SimpleNamespace(config=config, natural=natural, places=places)
    params = resume._pretrained(task, config.start_from)
    whole = loaded(GOLDEN / "gpt2", scan=True)[1]
    jax.tree.map(np.testing.assert_array_equal, lora.merged(params, model.lora_scale), whole)
    thin = params["blocks"]["qkv"]
    assert np.all(thin["lora_b"] == 0) and 0.1 < np.std(thin["lora_a"]) < 0.5
    thin["lora_b"] += 1
    folder.save(tmp_path / "to", model, params)
    expected = lora.merged(params, model.lora_scale)
    found = loaded(tmp_path / "to", scan=True)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def saved_run(run, **config):
    """A folder of a run with one checkpoint, whose recorded config says this."""
    checkpoints = store.open_checkpoints(run / "checkpoints")
    checkpoints.save(8, {"params": {"w": np.ones(2)}}, {"config": config} if config else {})
    checkpoints.close()
    return run


GPT = {"objective": "next_token", "model": {}, "data": {}, "start_from": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "classify"}, "is not a model that continues text"),
        ({"model": {"type": "ResNetConfig"}}, "is not a model that continues text"),
        ({"model": {"experts": 8}}, "with 'experts', which this version does not know"),
        ({"model": {"heads": [8]}}, "model.heads=.8,. must be a whole number"),
        ({"model": []}, "checkpoints/8, config: model is ..; needs an object"),
        ({"start_from": 8}, "checkpoints/8, config: start_from is 8; needs text or None"),
    ],
)
def test_what_is_no_language_model_is_not_exported(tmp_path, capsys, fields, message):
    run = saved_run(tmp_path / "run", **GPT | fields)
    with pytest.raises(SystemExit, match="2"):
        export.main([str(run), str(tmp_path / "to")])
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "to").exists()


def test_a_checkpoint_without_a_config_is_of_another_program(tmp_path):
    with pytest.raises(ValueError, match="checkpoints/8: config is nothing; needs an object"):
        export.export(saved_run(tmp_path / "run"), tmp_path / "to", "float32", None)


@pytest.mark.parametrize("times", [1, 99])
def test_an_export_of_a_running_run_takes_the_next_checkpoint_if_one_goes(
    tmp_path, small, monkeypatch, times
):
    model, params = small
    checkpoints = tmp_path / "run" / "checkpoints"
    chosen = []

    def save(step, add):
        saving = store.open_checkpoints(checkpoints)
        tree = {"params": jax.tree.map(lambda x: x + add, params)}
        saving.save(step, tree, {"config": GPT | {"model": dataclasses.asdict(model)}})
        saving.close()

    def read(saved, *args):
        chosen.append(saved.step)
        if len(chosen) <= times:
            save(saved.step + 1, 1.0)
            shutil.rmtree(saved.path)
        return whole(saved, *args)

    whole = mean.restore_whole
    monkeypatch.setattr(mean, "restore_whole", read)
    save(1, 0.0)
    go = lambda: export.export(tmp_path / "run", tmp_path / "to", "float32", None)
    if times > export._TRIES:
        with pytest.raises(ValueError, match=f"checkpoints/{export._TRIES} was removed while"):
            go()
        assert chosen == list(range(1, export._TRIES + 1)) and not (tmp_path / "to").exists()
        return
    go()
    assert chosen == [1, 2]
    found = loaded(tmp_path / "to")[1]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x + 1.0, y), params, found)


def test_a_run_that_started_from_itself_has_no_origin(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    saved_run(one, **GPT | {"start_from": str(two)})
    saved_run(two, **GPT | {"start_from": str(tmp_path / "." / "one")})
    assert export.origin(str(one)) is None
    assert "one started from itself; --like FOLDER" in capsys.readouterr().err


@pytest.fixture(scope="module")
def small():
    _, params, model = loaded(GOLDEN / "gpt2")
    return model, params


def test_a_folder_with_anything_in_it_is_not_written_to(tmp_path, small):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "model.safetensors").write_text("another model's")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for name in ("used", "link", "dangling", "file"):
        with pytest.raises(ValueError, match=f"{name} is not a new or an empty folder"):
            folder.save(tmp_path / name, *small)
    names = ["dangling", "elsewhere", "file", "link", "used"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert not any((tmp_path / "elsewhere").iterdir())
    (tmp_path / "empty").mkdir()
    folder.save(tmp_path / "empty", *small)
    assert loaded(tmp_path / "empty")


def test_a_folder_that_cannot_be_written_whole_leaves_nothing(tmp_path, small):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match=f"{tmp_path}/to cannot be written: File too large"):
            folder.save(tmp_path / "to", *small)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_program_makes_meanwhile_is_not_touched(tmp_path, small, monkeypatch):
    write_all = safetensors.write_all

    def slowly(*args):
        write_all(*args)
        (tmp_path / "to").mkdir()
        (tmp_path / "to" / "theirs").touch()

    monkeypatch.setattr(safetensors, "write_all", slowly)
    with pytest.raises(OSError, match="to cannot be written: Directory not empty"):
        folder.save(tmp_path / "to", *small)
    assert [path.name for path in tmp_path.rglob("*")] == ["to", "theirs"]


def test_the_tokenizer_of_a_run_from_nothing_goes_along(tmp_path, small, capsys):
    there = tokens.folder(tmp_path / "words", begin="<s>")
    words = {"data": {"tokenizer": str(there)}}
    folder.save(tmp_path / "to", *small, tokenizer=export.tokenizer_of(words))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "to" / name).read_text() == (there / name).read_text()
    gone, there = str(tmp_path / "gone"), "gone, whose tokenizer the run used, is gone: copy its"
    assert export.tokenizer_of({"data": {"tokenizer": gone}, "start_from": None}) is None
    assert there in capsys.readouterr().err
    assert export.tokenizer_of({"data": {"tokenizer": gone}, "start_from": gone}) is None
    assert not capsys.readouterr().err  # `origin` tells of it
    assert export.tokenizer_of({"data": {}}) is None


@pytest.mark.parametrize(("has_tokenizer", "ends"), [(True, [0, 1]), (False, [None, None])])
def test_a_run_from_nothing_names_its_first_and_last_token(tmp_path, small, has_tokenizer, ends):
    # Without them transformers takes those of the first models of the kind: 50256, or for Llama 2.
    words = tokens.folder(tmp_path / "words", begin="<s>") if has_tokenizer else None
    folder.save(tmp_path / "to", *small, tokenizer=words)
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert [written["bos_token_id"], written["eos_token_id"]] == ends


def test_a_folder_that_is_gone_is_told(tmp_path, capsys):
    assert export.origin(None) is None
    assert export.origin(str(tmp_path / "gone")) is None
    assert "gone is gone; --like FOLDER" in capsys.readouterr().err


def test_the_command_line_names_the_folder_of_a_pretrained_model(config, tmp_path):
    path = tmp_path / "fine_tune.py"
    path.write_text(
        "from train.config import Config, Optimizer\n"
        "from train.huggingface.pretrained import Pretrained\n\n\n"
        "def get_config():\n"
        "    update = 'adamw(learning_rate)'\n"
        "    return Config('a', 10, Optimizer(update, 1e-3), model=Pretrained())\n"
    )
    args = ["--start-from", config.start_from, "--model.context", "8"]
    made = configs.load(str(path), args)
    assert made.model == dataclasses.replace(config.model, dtype="bfloat16")
    with pytest.raises(ValueError, match="needs a pretrained model; write --start-from FOLDER"):
        configs.load(str(path))
    assert made.data.tokenizer == config.start_from
    other = dataclasses.replace(made.data, tokenizer="other")
    assert dataclasses.replace(config, model=Pretrained(8), data=other).data.tokenizer == "other"
    with pytest.raises(ValueError, match="is no Hugging Face folder"):
        dataclasses.replace(config, model=Pretrained(), start_from=str(tmp_path))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="is a run; write .*train.export .*run FOLDER"):
        dataclasses.replace(config, model=Pretrained(), start_from=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="model.context=17 is more than the model.positions=16"):
        dataclasses.replace(config, model=Pretrained(17))
    assert dataclasses.replace(config, model=Pretrained()).model.context == 16


def test_a_folder_of_bytes_needs_no_tokenizer(config, tmp_path):
    of_bytes = settings.settings_of(DecoderConfig(layers=1, width=8, heads=2, vocab=256))
    (tmp_path / "config.json").write_text(json.dumps(of_bytes))
    made = dataclasses.replace(config, model=Pretrained(), data=Data(), start_from=str(tmp_path))
    assert made.data.tokenizer is None
    (tmp_path / "tokenizer.json").touch()
    made = dataclasses.replace(config, model=Pretrained(), data=Data(), start_from=str(tmp_path))
    assert made.data.tokenizer == str(tmp_path)


@pytest.mark.parametrize("tokenizer", [None, "gone"])
def test_an_export_says_that_a_model_of_more_than_256_tokens_reads_bytes(
    tokenizer, tmp_path, monkeypatch
):
    model = DecoderConfig(layers=1, width=8, heads=2, context=8, vocab=300)
    _, params = modules.split(Decoder(model, rngs=modules.PathRngs(0)))
    run = {"data": {"tokenizer": tokenizer}, "start_from": None}
    monkeypatch.setattr(export, "_read", lambda _: (run, model, params))
    export.export(tmp_path / "run", tmp_path / "to", "float32", None)
    expected = None if tokenizer is None else tmp_path / "to"
    assert tokenizer_of(tmp_path / "to", 300) == expected


def test_an_adapter_is_added_to_its_base_before_a_run_starts_from_it(config, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    message = "is an adapter of some/model; write python -m train.export .*FOLDER --like BASE"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, model=Pretrained(), start_from=str(tmp_path))
    task = SimpleNamespace(config=dataclasses.replace(config, start_from=str(tmp_path)))
    with pytest.raises(ValueError, match=message):
        resume.begin(task, tmp_path / "new")


def test_a_folder_needs_a_decoder(config):
    with pytest.raises(ValueError, match="the model a ResNetConfig; write model=Pretrained"):
        settings.require_same(ResNetConfig(), config.model, "there")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        # The first page of an array is compared before anything is read, the others on the devices.
        ((0, 0), "weights in start: [0-9a-f]{12} on process 0, [0-9a-f]{12} on process 1"),
        ((50, 0), "the processes begin with different parameters .*start_from='start'"),
    ],
)
def test_two_hosts_with_different_weights_do_not_begin(tmp_path, place, message):
    config = faults.write_config(tmp_path / "config", steps=2)
    model = DecoderConfig(layers=1, width=32, heads=2, context=16)
    params = build.random_params(Config("c", 1, Optimizer("sgd(0.1)", 0.1), model=model))
    hosts = [tmp_path / "host_0", tmp_path / "host_1"]
    for host in hosts:
        folder.save(host / "start", model, params)
        embedding = np.array(params["embed"]["embedding"])
        embedding[place] += 1e-6
        params["embed"]["embedding"] = embedding
    with faults.started(config, 2, "--start-from", "start", folders=hosts) as run:
        assert faults.ended(run) == [2, 2]
        said = faults.said(run)
    assert all(re.search(message, each) for each in said), said
    assert not (run.folder / "checkpoints").exists() or not any(
        path.name.isdecimal() for path in (run.folder / "checkpoints").iterdir()
    )
