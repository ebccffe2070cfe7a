"""`python -m train.generate FOLDER PROMPT`: greedy text from a Hugging Face folder's model."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcomp.launch.exits import clean_exits
from train.data.tokenizer import load_tokenizer
from train.huggingface import folder, settings
from train.models import modules
from train.models.decoder import Decoder


def generated(path: pathlib.Path, prompt: str, count: int) -> str:
    """Continues a text with the likeliest tokens, in float32.

    Args:
      path: A Hugging Face folder with a tokenizer.json.
      prompt: The start of the text, at least one token.
      count: Tokens to add.

    Returns:
      The whole text.

    Raises:
      ValueError: If the folder or its tokenizer cannot be read, or the text is too long for the
        model.
    """
    tokenizer = load_tokenizer(path)
    tokens = [*tokenizer.begin, *tokenizer.encode([prompt])[0].tolist()]
    _, config = settings.read(path)
    if tokens and max(tokens) >= config.vocab:
        raise ValueError(
            f"{path}: its tokenizer has the token {max(tokens)}, but vocab_size of its config.json "
            f"is {config.vocab}; take the tokenizer of the model."
        )
    total = len(tokens) + count
    if not tokens or total > config.positions:
        raise ValueError(
            f"a text of {len(tokens)} + {count} tokens needs a prompt, and a model made for "
            f"more than {config.positions} tokens; write another PROMPT, or --tokens."
        )
    config = dataclasses.replace(config, context=total, scan=True)
    apply, shapes = modules.split(nnx.eval_shape(lambda: Decoder(config, rngs=modules.PathRngs(0))))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    text = jax.jit(lambda p, t: greedy(lambda tokens: apply(p, tokens), t, count))
    found = text(folder.load(path, config, like), jnp.asarray([tokens]))
    return tokenizer.decode(found[0].tolist())


def greedy(logits_of: Callable, prompt: jax.Array, count: int) -> jax.Array:
    """Appends the token with the largest logit to each row, `count` times.

    Recomputes all tokens for each new one, in one program: for short texts.

    Args:
      logits_of: i32[batch, time] -> f32[batch, time, vocab], a causal model.
      prompt: i32[batch, time], time at least 1.
      count: Tokens to append, at least 0.

    Returns:
      i32[batch, time + count].
    """
    first = prompt.shape[1]
    tokens = jnp.pad(jnp.asarray(prompt, jnp.int32), ((0, 0), (0, count)))

    def appended(place, tokens):
        logits_BxV = jax.lax.dynamic_index_in_dim(logits_of(tokens), place - 1, 1, keepdims=False)
        token_Bx1 = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(tokens, token_Bx1, place, 1)

    return jax.lax.fori_loop(first, first + count, appended, tokens)


def main(args: list[str]) -> None:
    """Runs the program; a user's mistake ends it with a message and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m train.generate", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=50, help="how many to add")
    options = parser.parse_args(args)
    with clean_exits():
        print(generated(options.folder, options.prompt, options.tokens))


if __name__ == "__main__":
    main(sys.argv[1:])
