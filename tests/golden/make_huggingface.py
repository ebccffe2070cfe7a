"""Makes tests/golden/huggingface: a tiny random checkpoint of each architecture, by transformers.

    pip install torch transformers    # in an environment of its own; made with 2.13 and 5.24
    python tests/golden/make_huggingface.py tests/golden/huggingface
    python tests/golden/make_huggingface.py --check FOLDER    # of exports with such an expected.npz

Each folder is what `save_pretrained` writes, and `expected.npz`: tokens i64[2, 12], transformers'
logits f32[2, 12, vocab] of them, and what it generates greedily after the first five of them. All
parameters are random, those too that transformers begins with zeros or ones.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, TIME, PROMPT = 64, 12, 5
TOKENS = 300
"""Of GPT-2, which has a tokenizer: 256 bytes, and some that stand for several."""
_COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}

CONFIGS = {
    "gpt2": transformers.GPT2Config(**_COMMON | {"vocab_size": TOKENS}, **_GPT),
    "opt": transformers.OPTConfig(
        **_COMMON,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    ),
    "gptj": transformers.GPTJConfig(**_COMMON, **_GPT, rotary_dim=4),
    "gpt_neox": transformers.GPTNeoXConfig(
        **_COMMON,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama": transformers.LlamaConfig(**_COMMON, **_LLAMA, rope_parameters=_LLAMA_3),
    "mistral": transformers.MistralConfig(**_COMMON, **_LLAMA, head_dim=6, sliding_window=4),
    "qwen2": transformers.Qwen2Config(**_COMMON, **_LLAMA, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_COMMON, **_LLAMA, head_dim=8),
}
HALF = "mistral"
"""Saved in bfloat16; its logits are those of float32 all the same."""
IN_PIECES = "llama"
"""Saved in several files."""


def randomized(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter: normal ones, around one for the factors of norms."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        one = name.endswith("weight") and parameter.ndim == 1
        parameter.data = float(one) + 0.25 * torch.randn_like(parameter)


def tokenizer(folder: pathlib.Path) -> None:
    """A byte-level BPE of 300 tokens, learned of this file."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, initial_alphabet=sorted(alphabet))
    made.train([__file__], trainer)
    made.save(str(folder / "tokenizer.json"))


def main(root: pathlib.Path) -> None:
    """Writes all folders."""
    for seed, (name, config) in enumerate(CONFIGS.items()):
        folder = root / name
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomized(model, seed)
        model.to(torch.bfloat16 if name == HALF else torch.float32)
        model.save_pretrained(folder, max_shard_size="8KB" if name == IN_PIECES else "1GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokens = torch.randint(0, config.vocab_size, (2, TIME))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
            generated = model.generate(
                tokens[:, :PROMPT], do_sample=False, max_new_tokens=TIME - PROMPT, pad_token_id=0
            )
        np.savez_compressed(
            folder / "expected.npz",
            tokens=tokens.numpy(),
            logits=logits.numpy().astype(np.float32),
            generated=generated.numpy(),
        )
    tokenizer(root / "gpt2")


def check(root: pathlib.Path) -> None:
    """Compares the logits of exported folders with those that their expected.npz has."""
    for folder in sorted(path.parent for path in root.glob("**/expected.npz")):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        expected = np.load(folder / "expected.npz")
        with torch.no_grad():
            logits = model(torch.from_numpy(expected["tokens"]), use_cache=False).logits.numpy()
        worst = np.abs(logits - expected["logits"]).max()
        wrong = {name: keys for name, keys in info.items() if keys}
        print(f"{folder.name}: largest difference of a logit {worst:.1e}, {wrong or 'all read'}")


if __name__ == "__main__":
    check(pathlib.Path(sys.argv[2])) if sys.argv[1] == "--check" else main(
        pathlib.Path(sys.argv[1])
    )
