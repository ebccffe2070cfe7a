"""The supported kinds of models in config.json, and the meaning of its fields."""

from typing import Any, NamedTuple

Settings = dict[str, Any]  # of config.json


class Form(NamedTuple):
    """A `model_type`: the meaning of its fields, and its requirements.

    Attributes:
      architecture: The class of transformers that loads it.
      sizes: DecoderConfig's field -> config.json's field and its default.
      always: DecoderConfig's fields that all models of the kind share.
      only: Fields of config.json with the only values that the decoder supports.
      also: Other names of fields of config.json, which transformers takes as well.
    """

    architecture: str
    sizes: dict[str, tuple[str, Any]]
    always: Settings
    only: Settings
    also: dict[str, tuple[str, ...]] = {}


_GPT = {
    "layers": ("n_layer", 12),
    "width": ("n_embd", 768),
    "heads": ("n_head", 12),
    "positions": ("n_positions", 1024),
    "vocab": ("vocab_size", 50257),
    "mlp": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
}
_GPT_ALSO = {
    "n_layer": ("num_hidden_layers",),
    "n_embd": ("hidden_size",),
    "n_head": ("num_attention_heads",),
    "n_positions": ("max_position_embeddings",),
}
_OPT = {
    "layers": ("num_hidden_layers", 12),
    "width": ("hidden_size", 768),
    "heads": ("num_attention_heads", 12),
    "positions": ("max_position_embeddings", 2048),
    "vocab": ("vocab_size", 50272),
    "mlp": ("ffn_dim", 3072),
    "activation": ("activation_function", "relu"),
    "tied": ("tie_word_embeddings", True),
}
_NEOX = {
    "layers": ("num_hidden_layers", 44),
    "width": ("hidden_size", 6144),
    "heads": ("num_attention_heads", 64),
    "positions": ("max_position_embeddings", 2048),
    "vocab": ("vocab_size", 50432),
    "mlp": ("intermediate_size", 24576),
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "tied": ("tie_word_embeddings", False),
    "qkv_bias": ("attention_bias", True),
    "out_bias": ("attention_bias", True),
}
_LLAMA = {
    "layers": ("num_hidden_layers", 32),
    "width": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", None),
    "head_width": ("head_dim", None),
    "positions": ("max_position_embeddings", 2048),
    "vocab": ("vocab_size", 32000),
    "mlp": ("intermediate_size", 11008),
    "activation": ("hidden_act", "silu"),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
}
_BIASES = {name: ("attention_bias", False) for name in ("qkv_bias", "out_bias")}
_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_LLAMA_FORM = {"norm": "rms", "gated": True, "rotary": "halves"}
_MISTRAL = {"mlp": ("intermediate_size", 14336), "kv_heads": ("num_key_value_heads", 8)}
_MISTRAL |= {"positions": ("max_position_embeddings", 131072)}
_QWEN = {"vocab": ("vocab_size", 151936), "mlp": ("intermediate_size", 22016)}
_QWEN |= {"kv_heads": ("num_key_value_heads", 32), "positions": ("max_position_embeddings", 32768)}

FORMS: dict[str, Form] = {
    "gpt2": Form(
        "GPT2LMHeadModel",
        _GPT | {"tied": ("tie_word_embeddings", True)},
        {},
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        _GPT_ALSO,
    ),
    "opt": Form(
        "OPTForCausalLM",
        _OPT,
        {"first_position": 2, "norm_eps": 1e-5},
        {
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "gptj": Form(
        "GPTJForCausalLM",
        _GPT
        | {"layers": ("n_layer", 28), "width": ("n_embd", 4096), "heads": ("n_head", 16)}
        | {"vocab": ("vocab_size", 50400), "positions": ("n_positions", 2048)}
        | {"rotary_width": ("rotary_dim", 64)},
        {"residual": "shared", "rotary": "pairs", "qkv_bias": False, "out_bias": False}
        | {"tied": False, "head_bias": True},
        {"tie_word_embeddings": False},
        _GPT_ALSO,
    ),
    "gpt_neox": Form("GPTNeoXForCausalLM", _NEOX, {"rotary": "halves"}, {}),
    "llama": Form(
        "LlamaForCausalLM",
        _LLAMA | _BIASES | {"mlp_bias": ("mlp_bias", False)},
        _LLAMA_FORM,
        {},
    ),
    "mistral": Form("MistralForCausalLM", _LLAMA | _MISTRAL, _LLAMA_FORM | _NO_BIAS, {}),
    "qwen2": Form(
        "Qwen2ForCausalLM", _LLAMA | _QWEN, _LLAMA_FORM | _NO_BIAS | {"qkv_bias": True}, {}
    ),
    "qwen3": Form(
        "Qwen3ForCausalLM",
        _LLAMA | _QWEN | _BIASES | {"head_width": ("head_dim", 128)},
        _LLAMA_FORM | {"qk_norm": True, "mlp_bias": False},
        {},
    ),
}
