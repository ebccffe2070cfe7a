"""Folders of Hugging Face: config.json, safetensors and their index."""

import json
import math

import numpy as np
from hypothesis import strategies as st

from tests.helpers.fuzzing import LEAVES, fuzz, objects, refused, texts
from train import checks
from train.huggingface import safetensors, settings
from train.models import rotary

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_head": 2, "n_layer": 1}
LLAMA = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
LLAMA |= {"intermediate_size": 16, "max_position_embeddings": 16, "model_type": "llama"}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"


@fuzz(st.one_of(objects(GPT2), objects(LLAMA | {"rope_scaling": SCALING})))
def test_settings_of_any_form(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps(value))
    if (found := refused(settings.read, tmp_path)) is not None:
        _computes(found[1])


@st.composite
def ropes(draw):
    """Rotary settings, nested by the kind of layer or not, most of them near a good one."""
    values = st.sampled_from([0, -1, 0.25, 1, 1e-46, 8.0, 5e5, 1e308, "llama3", "default", None])
    names = [*SCALING, "rope_theta", "type", "partial_rotary_factor", "mscale"]
    names += ["original_max_position_embeddings"]
    table = draw(st.sampled_from([{}, SCALING, {"rope_theta": 5e5}]))
    table = table | draw(st.dictionaries(st.sampled_from(names), values, max_size=2))
    kinds = draw(st.lists(st.sampled_from([FULL, SLIDING]), max_size=2, unique=True))
    return {kind: table for kind in kinds} or draw(st.sampled_from([table, None, [table]]))


KINDS = st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])
NUMBERS = st.one_of(st.sampled_from([None, 0, 1, 2, 4, 0.25, 0.5, 1e4, 5e5, -1, "4"]), LEAVES)
LISTS = st.lists(st.sampled_from([FULL, SLIDING, "chunked_attention"]), min_size=1, max_size=3)
PLACES = {
    "rope_parameters": ropes(),
    "rope_scaling": ropes(),
    "layer_types": st.one_of(LISTS, st.none()),
    "use_sliding_window": st.one_of(st.booleans(), LEAVES),
} | dict.fromkeys(
    "rope_theta rotary_emb_base rotary_pct partial_rotary_factor head_dim num_key_value_heads "
    "sliding_window max_window_layers rms_norm_eps layer_norm_eps tie_word_embeddings "
    "original_max_position_embeddings".split(),
    NUMBERS,
)
FIELDS = st.lists(st.sampled_from(sorted(PLACES)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: PLACES[name] for name in names})
)


@fuzz(st.tuples(KINDS, FIELDS), 300)
def test_settings_of_attention(given):
    kind, fields = given
    said = LLAMA | {"model_type": kind, "num_key_value_heads": 2} | fields
    if (found := refused(settings.decoder_of, said)) is None:
        return
    _computes(found)
    # What stands there is what is computed, wherever it stands.
    for place in (said, said.get("rope_parameters"), said.get("rope_scaling")):
        tables = [place, *(place or {}).values()] if isinstance(place, dict) else []
        for table in tables:
            theta = table.get("rope_theta") if isinstance(table, dict) else None
            assert theta is None or found.rotary_base == theta
            scaled = isinstance(table, dict) and table.get("rope_type") == "llama3"
            assert not scaled or found.rotary_scaling[0] == table["factor"]


def _computes(config):
    checks.require_types(config)
    turns = rotary.frequencies(config.rotated, config.rotary_base, config.rotary_scaling)
    assert np.isfinite(turns).all() and abs(turns).max() <= 1
    assert config.norm_eps > 0 and config.window >= 0


ENTRIES = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "BF16", "shape": [1, 2], "data_offsets": [8, 12]},
    "__metadata__": {"format": "pt"},
}
HEADERS = st.one_of(texts(json.dumps(ENTRIES)), objects(ENTRIES).map(lambda x: _dumped(x)))


def _dumped(value):
    return json.dumps(value).encode()


@fuzz(st.tuples(HEADERS, st.sampled_from([0, 11, 12, 13]), st.integers(-1, 1)))
def test_safetensors(tmp_path, given):
    header, size, longer = given
    file = tmp_path / "model.safetensors"
    length = max(0, len(header) + longer).to_bytes(8, "little")
    file.write_bytes(length + header + bytes(size))
    if (found := refused(safetensors.read, file)) is not None:
        rest = file.stat().st_size - 8 - int.from_bytes(length, "little")
        assert sum(array.nbytes for array in found.values()) == rest
        assert all(
            array.nbytes == math.prod(array.shape) * array.itemsize for array in found.values()
        )


@fuzz(st.binary(max_size=64))
def test_any_bytes_as_safetensors(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(safetensors.read_all, tmp_path)


INDEX = {"metadata": {"total_size": 8}, "weight_map": {"a": "one.safetensors", "b": "two"}}
NAMES = st.sampled_from(["one.safetensors", "two", "..", "../one", "/dev/zero", "", "none", "a\0b"])
MAPS = st.dictionaries(st.sampled_from(["a", "b", "c"]), NAMES, max_size=3)


@fuzz(
    st.one_of(
        texts(json.dumps(INDEX)),
        objects(INDEX).map(_dumped),
        MAPS.map(lambda places: _dumped({"weight_map": places})),
    )
)
def test_index(tmp_path, text):
    arrays = {name: np.ones(2, np.float32) for name in "ab"}
    for name, file in (("a", "one.safetensors"), ("b", "two")):
        safetensors.write(tmp_path / file, {name: arrays[name]})
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    if (found := refused(safetensors.read_all, tmp_path)) is not None:
        assert found.keys() <= arrays.keys()
