"""Configs, their overrides and expressions."""

import contextlib
import math
import os

import pytest
from hypothesis import strategies as st

from tests.helpers.fuzzing import LEAVES, NUMBERS, TEXT, fuzz, refused
from tests.helpers.launching import ROOT
from train import checks
from train.config import Config, Data, Images, Optimizer, expression
from train.config import run as configs
from train.models.decoder import DecoderConfig

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
        checks.require_types(made)
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
