"""`python -m train.generate FOLDER PROMPT...`: text from a Hugging Face folder's model."""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcomp.launch.exits import clean_exits, show
from train import checks
from train.data import chat as chats
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.huggingface import adapters, folder, settings
from train.huggingface.pretrained import tokenizer_of
from train.models import modules
from train.models.decoder import Decoder, DecoderConfig


def generated(
    path: pathlib.Path,
    prompts: Sequence[str],
    count: int,
    *,
    chat: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Continues texts, in float32, each up to the model's end token.

    Args:
      path: A Hugging Face folder with a tokenizer.json.
      prompts: The starts of the texts, at least one token each; with `chat`, a user's messages.
      count: Most tokens to add to each.
      chat: Whether each prompt is put into the folder's chat template, to be answered.
      temperature: 0 takes the likeliest token; above, tokens are drawn from the model's
        probabilities, with logits divided by it.
      seed: In [0, 2^32); each prompt has draws of its own by its place among the prompts.

    Returns:
      The whole texts; with `chat`, the answers alone.

    Raises:
      ValueError: If the folder, its tokenizer or its template cannot be read, or a text is too long
        for the model.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be in [0, 2^32); write --seed 0.")
    if not 0 <= temperature < math.inf or count < 0 or not prompts:
        raise ValueError(
            f"got {len(prompts)} prompts, temperature={temperature:g} and {count} tokens to add; "
            "needs a prompt, a temperature of 0 or more, such as --temperature 0.8, and --tokens "
            "of 0 or more."
        )
    folder.require_no_run(path)
    adapters.require_none(path)
    _, config = settings.read(path)
    source = tokenizer_of(path, config.vocab)
    tokenizer = load_tokenizer(source)
    rows = _encoded(tokenizer, path, prompts, chat)
    _check(rows, count, path, config)
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), int(lengths.max()) + count), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    config = dataclasses.replace(config, context=tokens.shape[1], scan=True)
    apply, shapes = modules.split(nnx.eval_shape(lambda: Decoder(config, rngs=modules.PathRngs(0))))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    # A newline is between documents of bytes, but within them, too.
    ends, key = _ends(path, tokenizer.end if source else ()), jax.random.key(seed)
    more = jax.jit(
        lambda p, t, n: continued(lambda t: apply(p, t), t, n, count, ends, temperature, key)
    )
    tokens, last = map(np.asarray, more(folder.load(path, config, like), tokens, lengths))
    first = lengths if chat else np.zeros_like(lengths)
    return [tokenizer.decode(t[a:b].tolist()) for t, a, b in zip(tokens, first, last, strict=True)]


def continued(
    logits_of: Callable[[jax.Array], jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    count: int,
    ends: Sequence[int] = (),
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes up to `count` tokens after each row's own, until one of `ends`.

    Recomputes all tokens for each new one, in one program: for short texts.

    Args:
      logits_of: i32[batch, time] -> f32[batch, time, vocab], a causal model.
      tokens: i32[batch, time], each row with room for `count` tokens more.
      lengths: i32[batch], the tokens that each row has, at least 1.
      count: Most tokens to add, at least 0.
      ends: Tokens after which a row is complete.
      temperature: 0 for the token with the largest logit, else that of a softmax to draw from.
      key: Key of the draws.

    Returns:
      The tokens, and the number of tokens that each row has now.
    """
    rows, most = jnp.arange(len(tokens)), jnp.asarray(lengths) + count

    def drawn(number, logits_BxV):
        if not temperature:
            return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, number), rows)
        return jax.vmap(jax.random.categorical)(keys, logits_BxV / temperature).astype(jnp.int32)

    def appended(state):
        number, tokens, lengths, going = state
        new = drawn(number, logits_of(tokens)[rows, lengths - 1])
        place = jnp.where(going, lengths, tokens.shape[1])  # no such place: nothing is written
        tokens, lengths = tokens.at[rows, place].set(new, mode="drop"), lengths + going
        going &= (lengths < most) & ~jnp.isin(new, jnp.array(ends, jnp.int32))
        return number + 1, tokens, lengths, going

    lengths = jnp.asarray(lengths, jnp.int32)
    start = 0, jnp.asarray(tokens, jnp.int32), lengths, lengths < most
    return jax.lax.while_loop(lambda state: jnp.any(state[-1]), appended, start)[1:3]


def _encoded(tokenizer: Tokenizer, path, prompts: Sequence[str], chat: bool) -> list[list[int]]:
    if not chat:
        return [[*tokenizer.begin, *row.tolist()] for row in tokenizer.encode(prompts)]
    render = chats.renderer(tokenizer, str(path))
    asked = ({"role": "user", "content": prompt} for prompt in prompts)
    made = [render(json.dumps([each, {"role": "assistant", "content": "?"}])) for each in asked]
    # What is before an answer is what the model has to go on from.
    return [row.tolist() for row in tokenizer.encode([text[: spans[0][0]] for text, spans in made])]


def _ends(path: pathlib.Path, default: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end a text: of generation_config.json or config.json, or the default."""
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            found = checks.json_object(path / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
    return default


def _check(rows: list[list[int]], count: int, path: pathlib.Path, config: DecoderConfig) -> None:
    largest = max((token for row in rows for token in row), default=0)
    if largest >= config.vocab:
        raise ValueError(
            f"{path}: its tokenizer has the token {largest}, but vocab_size of its config.json "
            f"is {config.vocab}; take the tokenizer of the model."
        )
    longest = max(map(len, rows))
    if not min(map(len, rows)) or longest + count > config.positions:
        raise ValueError(
            f"a text of {longest} + {count} tokens needs a prompt, and a model made for "
            f"more than {config.positions} tokens; write another PROMPT, or --tokens."
        )


def main(args: list[str]) -> None:
    """Runs the program; a user's mistake ends it with a message and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m train.generate", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("prompt", nargs="+", help="one or several, continued side by side")
    parser.add_argument("--tokens", type=int, default=50, help="how many to add at most")
    parser.add_argument("--chat", action="store_true", help="answer by the folder's chat template")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: the likeliest tokens; 1: as probable"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what --temperature draws")
    options = parser.parse_args(args)
    how = {"chat": options.chat, "temperature": options.temperature, "seed": options.seed}
    with clean_exits():
        show("\n".join(generated(options.folder, options.prompt, options.tokens, **how)))


if __name__ == "__main__":
    main(sys.argv[1:])
