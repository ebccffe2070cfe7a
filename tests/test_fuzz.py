"""Whatever a parser is given, it reads it or says what is wrong: no traceback, no hang.

`make fuzz` tries 100,000 inputs of each, where the suite tries as many as fit a second or two.
"""

import contextlib
import copy
import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxcomp.measure import hlo
from tests.helpers.launching import ROOT
from train import checks, compare, deepspeed
from train.checkpoints import files, resume, store
from train.config import Config, Data, Images, Optimizer, expression
from train.config import run as configs
from train.huggingface import settings as huggingface
from train.launch import detect, ssh
from train.models.decoder import DecoderConfig
from train.output import metrics, plots, progress
from train.processes import addresses, seals

FUZZ = int(os.environ.get("FUZZ", "0"))  # inputs of each parser; 0: what the suite has time for

TEXT = st.text(max_size=80)
NUMBERS = st.one_of(
    st.integers(-3), st.integers(), st.floats(), st.sampled_from([10**400, 2**63, True])
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)


def trees(keys=TEXT):
    """JSON values, objects among them whose keys are those of a file."""
    keys = st.one_of(keys, TEXT)
    return st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


def texts(good: str, keys=TEXT):
    """Texts of a file: any bytes, any JSON, and a good one with pieces cut, doubled or replaced."""

    @st.composite
    def harmed(draw):
        text = good
        for _ in range(draw(st.integers(1, 3))):
            begin = draw(st.integers(0, len(text)))
            end = draw(st.integers(begin, min(len(text), begin + 40)))
            piece = draw(st.one_of(TEXT, st.just(text[begin:end] * 2), LEAVES.map(_dumped)))
            text = text[:begin] + piece + text[end:]
        return text.encode(errors="surrogatepass")

    return st.one_of(
        st.binary(max_size=200),
        trees(keys).map(lambda value: _dumped(value).encode(errors="surrogatepass")),
        st.just(b"[" * 60_000),
        harmed(),
    )


def _dumped(value):
    return json.dumps(value)


def objects(good: dict):
    """A good object with some of its values, however deep, replaced by any other, or gone."""

    @st.composite
    def harmed(draw):
        value = copy.deepcopy(good)
        for _ in range(draw(st.integers(1, 2))):
            node = value
            while True:
                key = draw(
                    st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node)))
                )
                inner = node[key]
                if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
                    break
                node = inner
            node[key] = draw(trees())
            if isinstance(node, dict) and draw(st.booleans()):
                node[draw(TEXT)] = draw(LEAVES)
        return value

    return st.one_of(trees(), harmed())


def fuzz(strategy, few=100):
    """Tries inputs of a strategy: `few` of them in the suite."""

    def decorated(test):
        quiet = [
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ]
        return settings(
            max_examples=FUZZ or few, deadline=5000, derandomize=not FUZZ, database=None,
            suppress_health_check=quiet,
        )(given(strategy)(test))  # fmt: skip

    return decorated


def refused(call, *args, **kwargs):
    """What a call returns, or None if it refuses its input in words of one line."""
    try:
        return call(*args, **kwargs)
    except ValueError as error:
        assert str(error)


# Configs and overrides.

OPTIMIZER = Optimizer("chain(compressed_mean(quantize(4), axis_name), sgd(0.1))", 0.1)
FIELDS = {
    Optimizer: {"update": OPTIMIZER.update, "learning_rate": 0.1},
    Data: {},
    Images: {},
    DecoderConfig: {},
    Config: {"name": "run", "steps": 8, "optimizer": OPTIMIZER},
}


@st.composite
def settings_of(draw):
    kind = draw(st.sampled_from(list(FIELDS)))
    names = st.sampled_from([*kind.__dataclass_fields__])
    values = st.one_of(LEAVES, st.tuples(NUMBERS, NUMBERS), st.just("3e-3"), st.just(-1))
    return kind, FIELDS[kind] | draw(st.dictionaries(names, values, min_size=1, max_size=2))


def numbers_in(settings):
    return [x for x in vars(settings).values() if isinstance(x, int | float)]


@fuzz(settings_of())
def test_settings_are_of_their_types_and_finite(given):
    kind, values = given
    if (made := refused(kind, **values)) is not None:
        assert all(map(math.isfinite, numbers_in(made)))
        checks.of_types(made)
        if kind is Optimizer:
            assert made.learning_rate > 0 and made.warmup_steps >= 0
        if kind is Config:
            assert made.steps >= 1 and made.data.batch >= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True, None])
def test_a_number_of_a_model_is_a_finite_number(value):
    with pytest.raises(ValueError, match=r"model\.norm_eps=.* must be a finite number"):
        DecoderConfig(norm_eps=value)


FLAGS = st.sampled_from("--steps --optimizer.learning-rate --data.batch --seed --qsdp".split())
VALUES = st.sampled_from("nan -1 inf 3e-3 None 0 ten 1e400 64".split())


@fuzz(st.lists(st.one_of(FLAGS, VALUES, TEXT), max_size=4), 10)
def test_overrides(args):
    config = None
    with contextlib.suppress(SystemExit), open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
            config = refused(configs.load, str(ROOT / "configs" / "nano_4bit.py"), args)
    if config is not None:
        assert config.steps >= 1 and 0 < config.optimizer.learning_rate < math.inf


WORDS = st.sampled_from(
    "chain ( ) , . 'a' 1e999 -1 nan [ ] = adamw learning_rate jaxcomp optax schedules "
    "quantize compressed_mean axis_name __class__ lambda : ** os b1 {".split()
)


@fuzz(st.one_of(TEXT, st.lists(WORDS, max_size=12).map("".join), st.just("(" * 300)))
def test_expressions(text):
    names = dict.fromkeys(("learning_rate", "axis_name", "steps", "warmup_steps"))
    refused(expression.check, text, names)


# Files of a run.

ROW = {"step": 8, "loss": 0.5, "val_loss": 0.25, "learning_rate": 0.1, "sent_bytes": 10.0}
ROW |= {"step_seconds": 0.1, "rounds": 8, "skipped": 0, "left_out": 0}
LINES = "".join(json.dumps(ROW | {"step": step}) + "\n" for step in (0, 4, 8))
RECORD = {
    "plan": {"sent_bytes_per_step": 4.0, "parameters": 100, "replicas": 4},
    "config": {"fast": 1},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RECORD))
    (tmp_path / "metrics.jsonl").write_text(LINES)
    return tmp_path


@fuzz(texts(LINES, st.sampled_from(sorted(ROW))))
def test_metrics(folder, text):
    log = folder / "metrics.jsonl"
    log.write_bytes(text)
    if refused(metrics.keep_until, log, 4) is None and (rows := refused(metrics.read, log)):
        assert all(0 <= row["step"] <= 4 for row in rows)
        refused(plots.curve, "run", rows)


@fuzz(objects(RECORD))
def test_the_record_of_a_run_in_a_comparison(folder, value):
    (folder / "config.json").write_text(json.dumps(value))
    if (facts := refused(compare._facts, folder / "config.json")) is not None:
        compare._line("run", metrics.read(folder / "metrics.jsonl"), *facts)


@fuzz(st.one_of(TEXT, st.just("run: step 1/2, loss 1, 01:00 left")))
def test_lines_of_progress(text):
    progress.read(text)


SAVED = {
    "progress": {"step": 4, "losses": [0.5], "parts": {"all": 4}, "sent_bytes": 8.0},
    "num_replicas": 4,
    "data_sha256": "0" * 64,
    "config": {"data": {"batch": 32}},
}


@fuzz(objects(SAVED))
def test_metadata_of_checkpoints(value):
    if isinstance(value, dict) and value.keys() >= SAVED.keys():
        if (done := refused(resume._progress, "checkpoints/4", value, 4)) is not None:
            assert done.step >= 0 and done.sent_bytes >= 0


@fuzz(texts(json.dumps({"leaves": {"w": "float32[2]"}, "run": SAVED}), st.sampled_from(["run"])))
def test_files_of_metadata(folder, text):
    (folder / "metadata").mkdir(exist_ok=True)
    (folder / "metadata" / "metadata").write_bytes(text)
    refused(store._record, folder)


SUMS = {"metadata/metadata": [2, 0], "state/a": [4, 1]}


@fuzz(st.one_of(texts(json.dumps(SUMS)), objects(SUMS).map(lambda x: json.dumps(x).encode())))
def test_checksums(folder, text):
    (folder / "checksums.json").write_bytes(text)
    assert files._damage(folder)  # none of these files is there


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"progress": {"epochs": 2}}, "counts epochs, which this version does not know"),
        ({"progress": {"step": -1}}, "progress.step=-1 must be at least 0"),
        ({"progress": {"step": True}}, "progress.step=True must be a whole number"),
        ({"num_replicas": "4"}, "metadata with num_replicas='4'"),
    ],
)
def test_what_is_wrong_in_a_checkpoint_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        resume._progress("checkpoints/4", SAVED | changed, 4)
    assert resume._progress("checkpoints/4", SAVED, 4).examples == 128


def test_checksums_of_another_shape_are_damage(folder):
    for text in ("{}", "[]", '{"metadata/metadata": 3}', '{"metadata/metadata": [1, "a"]}'):
        (folder / "checksums.json").write_text(text)
        assert "checksums.json" in files._damage(folder)


# Files and words of others.


@fuzz(texts("alice@h1 slots=2\nh2 # last\n[::1]\n"))
def test_hosts(text):
    hosts = refused(ssh.read_hosts, text.decode(errors="surrogateescape"))
    for host in hosts or []:
        assert 1 <= host.slots <= ssh.MOST_SLOTS and not host.target.startswith("-")


@fuzz(st.one_of(TEXT, st.sampled_from(["[::1]:80", "h:99999", ":", "h:١"])))
def test_addresses(text):
    if (found := refused(addresses.split, text)) is not None:
        assert 0 < found[1] < 2**16


@fuzz(texts(json.dumps({"process": 1, "of": 2, "on": "h", "nonce": "0" * 32})))
def test_what_comes_to_the_rendezvous(line):
    text = line.decode(errors="replace")
    assert seals.unseal(b"a secret of a run", "hello", text) is None
    seals.json_object(text)


DEEPSPEED = {
    "optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True},
}


@fuzz(objects(DEEPSPEED))
def test_deepspeed(value):
    if (found := refused(deepspeed.translate, value, 10)) is not None:
        compile(deepspeed.to_python(found, "run"), "run.py", "exec")
        with contextlib.suppress(ValueError):  # the config says what it does not take
            assert 0 < Optimizer(**found.optimizer).learning_rate < math.inf


GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_head": 2, "n_layer": 1}
LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2}
LLAMA |= {"num_hidden_layers": 1, "intermediate_size": 16, "max_position_embeddings": 16}
LLAMA |= {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}


@fuzz(st.one_of(objects(GPT2), objects(LLAMA)))
def test_settings_of_hugging_face(folder, value):
    (folder / "config.json").write_text(json.dumps(value))
    if (found := refused(huggingface.read, folder)) is not None:
        checks.of_types(found[1])


VARIABLES = {
    "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7",
    "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip


WRITTEN = st.text("0123456789[]-,()xn\u0661", max_size=9)


@fuzz(st.dictionaries(st.sampled_from(sorted(VARIABLES)), WRITTEN))
def test_variables_of_schedulers(values):
    refused(detect.detect, VARIABLES | values)


# Texts of compiled programs.

HLO = """HloModule jit_f, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %r)
}

%less (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[8]{0}) tuple(%zero, %x)
  %w = (s32[], f32[8]{0}) while(%t), condition=%less, body=%body
  ROOT %y = f32[8]{0} get-tuple-element(%w), index=1
}
"""


@st.composite
def programs(draw):
    """A program whose lines are swapped, left out, doubled, or have their words replaced."""
    lines = HLO.split("\n")
    words = sorted(set(HLO.replace("(", " ").replace(")", " ").replace(",", " ").split()))
    for _ in range(draw(st.integers(1, 4))):
        at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        how = draw(st.sampled_from(["swap", "double", "drop", "word", "text"]))
        if how == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        elif how == "double":
            lines.insert(at, lines[other])
        elif how == "drop":
            lines[at] = ""
        elif how == "word":
            lines[at] = lines[at].replace(
                draw(st.sampled_from(words)), draw(st.sampled_from(words))
            )
        else:
            lines[at] = lines[at][: draw(st.integers(0, 30))] + draw(TEXT) + lines[at][30:]
    return "\n".join(lines)


def read_program(text):
    module = hlo.parse(text)
    for number, execution in enumerate(hlo.executions(module)):
        if number > 1000:
            break
        hlo.num_bytes(execution.instruction.type)
        hlo.called(execution.instruction)


@fuzz(programs(), 150)
def test_programs(text):
    refused(read_program, text)
