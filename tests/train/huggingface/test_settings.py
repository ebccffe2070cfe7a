"""What config.json means: spellings that differ, and values that no model computes, are refused."""

import math

import pytest

from train.huggingface import settings
from train.models.decoder import DecoderConfig

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2}
LLAMA |= {"num_hidden_layers": 2, "intermediate_size": 16, "max_position_embeddings": 16}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_head": 2, "n_layer": 1}
NEOX = LLAMA | {"model_type": "gpt_neox"}
QWEN = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2}
MISTRAL = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8}
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("model", "fields", "two"),
    [
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "rope_theta"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA_3},
            "rope_parameters.rope_type='default', but rope_scaling.rope_type='llama3'",
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LLAMA_3},
            "rope_parameters.rope_type='default', but rope_scaling.rope_type='llama3'",
        ),
        (
            LLAMA,
            {"rope_parameters": LLAMA_3, "rope_scaling": LLAMA_3 | {"factor": 4.0}},
            "rope_parameters.factor=8.0, but rope_scaling.factor=4.0",
        ),
        (
            LLAMA,
            {"rope_scaling": LLAMA_3 | {"type": "linear"}},
            "rope_scaling.rope_type='llama3', but rope_scaling.type='linear'",
        ),
        (LLAMA, {"rope_scaling": LLAMA_3, "original_max_position_embeddings": 4}, "but original_"),
        (NEOX, {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "but rotary_pct=0.5"),
        (
            NEOX,
            {"rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
            "rotary_pct",
        ),
        (NEOX, {"rotary_emb_base": 1e4, "rope_theta": 1e5}, "but rotary_emb_base=10000.0"),
        (GPT2, {"hidden_size": 16}, "n_embd=8, but hidden_size=16"),
        (GPT2, {"n_positions": 8, "max_position_embeddings": 4}, "but max_position_embeddings=4"),
    ],
)
def test_two_spellings_with_two_values_are_refused_by_name(model, fields, two):
    with pytest.raises(ValueError, match=f"there has .*{two}.*Remove the other"):
        settings.decoder_of(model | fields, "there")


@pytest.mark.parametrize(
    ("model", "fields", "expected"),
    [
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}, {"rotary_base": 5e5}),
        (
            LLAMA,
            {"rope_scaling": LLAMA_3, "rope_theta": 500_000}
            | {"rope_parameters": LLAMA_3 | {"rope_theta": 5e5}},
            {"rotary_base": 5e5, "rotary_scaling": (8.0, 1.0, 4.0, 8.0)},
        ),
        (
            LLAMA,  # nested as in models whose layers differ; theta was lost
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}}},
            {"rotary_base": 5e5},
        ),
        (LLAMA, {"rope_scaling": {"full_attention": LLAMA_3}}, {"rotary_scaling": (8, 1, 4, 8)}),
        (NEOX, {"rotary_pct": 0.5, "partial_rotary_factor": 0.5}, {"rotary_width": 8}),
        (GPT2, {"hidden_size": 8, "num_attention_heads": 2}, {"width": 8, "heads": 2}),
        (
            {"model_type": "gpt2", "hidden_size": 48, "num_attention_heads": 3},
            {"num_hidden_layers": 2, "max_position_embeddings": 32},
            {"width": 48, "heads": 3, "layers": 2, "positions": 32},
        ),
        (QWEN, {"layer_types": FULL, "sliding_window": 4}, {"window": 0}),
        (
            QWEN,
            {"layer_types": SLIDING, "sliding_window": 4, "use_sliding_window": True},
            {"window": 4},
        ),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 0}, {"window": 4096}),
        (MISTRAL, {}, {"window": 4096}),
        (MISTRAL, {"layer_types": SLIDING, "sliding_window": 4}, {"window": 4}),
        (MISTRAL, {"layer_types": FULL, "sliding_window": None}, {"window": 0}),
    ],
)
def test_what_all_spellings_say_is_read(model, fields, expected):
    found = settings.decoder_of(model | fields)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (LLAMA, {"rms_norm_eps": -1}, "norm_eps=-1 must be positive"),
        (LLAMA, {"rms_norm_eps": 1e-46}, "norm_eps=1e-46 must be positive"),
        (GPT2, {"layer_norm_epsilon": 1e300}, r"norm_eps=1e\+300 must be positive"),
        (LLAMA, {"rms_norm_eps": math.nan}, "rms_norm_eps is nan; needs a finite number"),
        (LLAMA, {"rope_theta": 0}, "rotary_base=0.0 must be at least 1"),
        (LLAMA, {"rope_parameters": {"rope_theta": -1e4}}, "rotary_base=-10000.0 must be at least"),
        (LLAMA, {"rope_theta": "1e4"}, "rope_theta is '1e4'; needs a finite number"),
        (LLAMA, {"rope_scaling": LLAMA_3 | {"factor": 0}}, "rotary_scaling=.0.0, 1.0, 4.0, 8.0. m"),
        (LLAMA, {"rope_scaling": LLAMA_3 | {"factor": None}}, "factor=None, which .* llama3"),
        (LLAMA, {"rope_scaling": LLAMA_3 | {"low_freq_factor": 4}}, "factors 0 < low < high"),
        (LLAMA, {"rope_scaling": {"factor": 2.0}}, "factor=2.0.*a rope_type that uses it"),
        (LLAMA, {"rope_scaling": LLAMA_3 | {"mscale": 2.0}}, "rope_scaling.mscale=2.0"),
        (LLAMA, {"rope_scaling": [1]}, r"rope_scaling is \[1\]; needs an object"),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": LLAMA_3, "sliding_attention": {}}},
            "rope_parameters=.* the same for all layers",
        ),
        (
            LLAMA,
            {"rope_parameters": {"full_attention": LLAMA_3, "rope_theta": 1e4}},
            "rope_parameters=.* the same for all layers",
        ),
        (NEOX, {"rotary_pct": 0}, "rotary_pct=0, which"),
        (NEOX, {"rotary_pct": 0.01}, "rotary_pct=0.01, which"),  # no feature; 0 would mean all
        (QWEN, {"layer_types": 8}, "layer_types is 8; needs a list of text each"),
        (QWEN, {"layer_types": FULL[:1]}, "2 layers that are all alike"),
        (QWEN, {"layer_types": SLIDING, "sliding_window": 4}, "full_attention, as the other"),
        (LLAMA, {"layer_types": SLIDING}, "full_attention, as the other settings say"),
        (MISTRAL, {"layer_types": FULL, "sliding_window": 4}, "sliding_attention, as the other"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window=0, which .* at least 1, or null"),
        (LLAMA, {"vocab_size": 2**31}, f"vocab_size={2**31}, which .* at most {2**31 - 1}"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads=0, which"),
        (LLAMA, {"num_hidden_layers": "2"}, "num_hidden_layers is '2'; needs a whole number"),
        (LLAMA, {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]; needs text"),
        (LLAMA, {"model_type": ["llama"]}, r"model_type=\['llama'\]"),
        (LLAMA, {"head_dim": 3}, "there is of a model that cannot be: model.rotary_width=3"),
    ],
)
def test_values_that_no_model_computes_are_refused(model, fields, message):
    with pytest.raises(ValueError, match=message):
        settings.decoder_of(model | fields, "there")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_eps": 0.0}, r"model.norm_eps=0.0 must be positive.*--model.norm-eps 1e-6"),
        ({"rotary": "pairs", "rotary_base": 0.5}, r"write --model.rotary-base 10000"),
        ({"rotary_scaling": (0.5, 1.0, 4.0, 8.0)}, "must be .factor, low, high, context. with"),
        ({"rotary_scaling": (8.0, 1.0, 4.0, 0.0)}, "must be .factor, low, high, context. with"),
    ],
)
def test_a_config_that_computes_nan_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**fields)
