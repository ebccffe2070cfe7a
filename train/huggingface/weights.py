"""Names and layouts of each kind of model's arrays, mapped to the decoder's parameters."""

import re
from typing import NamedTuple

import numpy as np

from train.models.decoder import DecoderConfig


class Names(NamedTuple):
    """A kind of model's names of modules, in the order of the decoder's.

    Attributes:
      base: Prefix of all names except the output matrix; checkpoints of the bare model lack it.
      blocks: Prefix of a block's names, from its number.
      outside: Names outside blocks.
      inside: Names in a block; several names are parts of one array.
      head: The output matrix, if it is untied.
    """

    base: str
    blocks: str
    outside: dict[str, str]
    inside: dict[str, tuple[str, ...]]
    head: str = "lm_head"


_QKV = ("q_proj", "k_proj", "v_proj")
_LLAMA = Names(
    base="model.",
    blocks="layers.{}.",
    outside={"embed": "embed_tokens", "norm": "norm"},
    inside={
        "norm_attention": ("input_layernorm",),
        "qkv": tuple(f"self_attn.{name}" for name in _QKV),
        "norm_q": ("self_attn.q_norm",),
        "norm_k": ("self_attn.k_norm",),
        "out": ("self_attn.o_proj",),
        "norm_mlp": ("post_attention_layernorm",),
        "gate": ("mlp.gate_proj",),
        "up": ("mlp.up_proj",),
        "down": ("mlp.down_proj",),
    },
)
NAMES: dict[str, Names] = {
    "gpt2": Names(
        base="transformer.",
        blocks="h.{}.",
        outside={"embed": "wte", "position": "wpe", "norm": "ln_f"},
        inside={
            "norm_attention": ("ln_1",),
            "qkv": ("attn.c_attn",),
            "out": ("attn.c_proj",),
            "norm_mlp": ("ln_2",),
            "up": ("mlp.c_fc",),
            "down": ("mlp.c_proj",),
        },
    ),
    "opt": Names(
        base="model.decoder.",
        blocks="layers.{}.",
        outside={
            "embed": "embed_tokens",
            "position": "embed_positions",
            "norm": "final_layer_norm",
        },
        inside={
            "norm_attention": ("self_attn_layer_norm",),
            "qkv": tuple(f"self_attn.{name}" for name in _QKV),
            "out": ("self_attn.out_proj",),
            "norm_mlp": ("final_layer_norm",),
            "up": ("fc1",),
            "down": ("fc2",),
        },
    ),
    "gptj": Names(
        base="transformer.",
        blocks="h.{}.",
        outside={"embed": "wte", "norm": "ln_f"},
        inside={
            "norm_attention": ("ln_1",),
            "qkv": tuple(f"attn.{name}" for name in _QKV),
            "out": ("attn.out_proj",),
            "up": ("mlp.fc_in",),
            "down": ("mlp.fc_out",),
        },
    ),
    "gpt_neox": Names(
        base="gpt_neox.",
        blocks="layers.{}.",
        outside={"embed": "embed_in", "norm": "final_layer_norm"},
        inside={
            "norm_attention": ("input_layernorm",),
            "qkv": ("attention.query_key_value",),
            "out": ("attention.dense",),
            "norm_mlp": ("post_attention_layernorm",),
            "up": ("mlp.dense_h_to_4h",),
            "down": ("mlp.dense_4h_to_h",),
        },
        head="embed_out",
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}
NOT_READ = re.compile(r"\b(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Arrays of older checkpoints that are not parameters."""


def names_of(kind: str, path: str, layer: int | None) -> list[str]:
    """A kind of model's name for a parameter: one name, or those of its parts in order.

    Args:
      kind: The `model_type`.
      path: Path of the parameter, such as `norm/scale`, or inside a block, such as `qkv/kernel`.
      layer: The block's number, or None outside of blocks.
    """
    names, (module, _, leaf) = NAMES[kind], path.partition("/")
    suffix = ".bias" if leaf == "bias" else ".weight"
    if layer is not None:
        prefix = names.base + names.blocks.format(layer)
        return [prefix + name + suffix for name in names.inside[module]]
    if module == "head":
        return [names.head + suffix]
    return [names.base + names.outside[module] + suffix]


def head_of(kind: str) -> str:
    """A kind of model's name for the output matrix, tied or not."""
    return f"{NAMES[kind].head}.weight"


def from_parts(kind: str, path: str, config: DecoderConfig, parts: list[np.ndarray]) -> np.ndarray:
    """A parameter in the decoder's layout, from the arrays of `names_of`."""
    if kind == "gpt_neox" and path.startswith("qkv/"):
        parts = [_regrouped(part, (config.heads, 3), config.head_size) for part in parts]
    if path.endswith("/kernel") and kind != "gpt2" or path.startswith("head/kernel"):
        parts = [part.T for part in parts]  # GPT-2's have inputs first, like ours
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def parted(kind: str, path: str, config: DecoderConfig, array: np.ndarray) -> list[np.ndarray]:
    """The arrays of `names_of`, from a parameter in the decoder's layout: undoes `from_parts`."""
    parts = [array]
    if path.startswith("qkv/") and kind not in ("gpt2", "gpt_neox"):
        heads, keys = config.heads, config.heads + (config.kv_heads or config.heads)
        parts = np.split(array, (heads * config.head_size, keys * config.head_size), axis=-1)
    if path.endswith("/kernel") and kind != "gpt2" or path.startswith("head/kernel"):
        parts = [part.T for part in parts]
    if kind == "gpt_neox" and path.startswith("qkv/"):
        parts = [_regrouped(part, (3, config.heads), config.head_size) for part in parts]
    return parts


def _regrouped(array: np.ndarray, groups: tuple[int, int], size: int) -> np.ndarray:
    """Swaps the two levels of groups of rows: GPT-NeoX stores q, k and v of each head together."""
    rows = array.reshape(*groups, size, *array.shape[1:])
    return rows.swapaxes(0, 1).reshape(array.shape)
