"""`python -m train.export RUN FOLDER`: writes a run's parameters as a Hugging Face folder.

With `--adapter` it writes LoRA's matrices alone, as peft does. In place of RUN it takes an adapter
of peft, which it adds to the folder of `--like`.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcomp.launch.exits import clean_exits, say, show
from train import checks
from train.checkpoints import files, mean, store
from train.huggingface import adapters, folder
from train.models import lora, modules
from train.models.decoder import Decoder, DecoderConfig

_TRIES = 10  # of a run that removes its checkpoints while they are read


def export(run: pathlib.Path, to: pathlib.Path, dtype: str, like: pathlib.Path | None) -> None:
    """Writes the parameters of a run's last checkpoint, averaged over its replicas.

    Args:
      run: The run's folder, such as runs/nano_dense. The run may go on meanwhile.
      to: The new folder.
      dtype: float32, bfloat16 or float16.
      like: The Hugging Face folder whose tokenizer and config.json are copied. None: the one that
        the run, or the first run of its chain, started from, and the run's tokenizer.

    Raises:
      ValueError: If the run is not a language model, or Hugging Face has no such architecture.
    """
    folder.require_new(to)  # before the arrays are read
    for left in reversed(range(_TRIES)):
        try:
            config, model, params = _read(run)
            break
        except files.Removed:  # the run has newer ones
            if not left:
                raise
    tokenizer, like = like or tokenizer_of(config), like or origin(config["start_from"])
    reads_bytes = like is None and config["data"].get("tokenizer") is None
    folder.save(to, model, params, jnp.dtype(dtype), like, tokenizer, reads_bytes)


def export_adapter(run: pathlib.Path, to: pathlib.Path, like: pathlib.Path | None) -> None:
    """Writes a run's LoRA, averaged over its replicas, as an adapter for peft.

    Args:
      run: The run's folder.
      to: The new folder.
      like: The Hugging Face folder that the adapter is of. None: the one that the run started from.

    Raises:
      ValueError: If the run has no LoRA, or it or a run that it began with trained more than that.
    """
    config, model, params = _read(run)
    for name, each in [(run, config), *_chain(config["start_from"])]:
        if each.get("trainable") != lora.TRAINED:
            began = "" if name == run else f", with which {run} began,"
            raise ValueError(
                f"{name}{began} trained {each.get('trainable') or 'all parameters'}, and an "
                f"adapter has {lora.TRAINED} alone; leave --adapter out."
            )
    base = like or origin(config["start_from"])
    if base is None:
        raise ValueError(f"{run} started from no Hugging Face folder; name one as --like FOLDER.")
    adapters.save(to, model, params, base)


def _read(run: pathlib.Path) -> tuple[dict[str, Any], DecoderConfig, Any]:
    """The config, the model and the parameters of a run's newest checkpoint."""
    saved = store.choose(run / "checkpoints")
    config = recorded(saved)
    model = model_of(config, run)
    _, shapes = modules.split(nnx.eval_shape(lambda: Decoder(model, rngs=modules.PathRngs(0))))
    return config, model, mean.restore_whole(saved, shapes, jax.make_mesh((1,), ("replica",)))


def recorded(saved: store.Saved) -> dict[str, Any]:
    """The config of a run that saved a checkpoint.

    Raises:
      ValueError: If it is not of a run of this program.
    """
    checks.require_keys(saved.metadata, str(saved.path), config=dict[str, Any])
    config, table = saved.metadata["config"], dict[str, Any]
    kinds = {"objective": str, "model": table, "data": table, "start_from": str | None}
    checks.require_keys(config, f"{saved.path}, config", **kinds)
    return config


def model_of(config: dict[str, Any], run: pathlib.Path) -> DecoderConfig:
    """The decoder of a recorded config."""
    model = dict(config["model"])
    if config["objective"] != "next_token" or model.pop("type", "DecoderConfig") != "DecoderConfig":
        raise ValueError(f"{run} is not a model that continues text; export another run.")
    if strange := model.keys() - {field.name for field in dataclasses.fields(DecoderConfig)}:
        raise ValueError(
            f"{run} has a model with {min(strange)!r:.80}, which this version does not know; "
            "export it with the version that trained it."
        )
    return DecoderConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in model.items()})


def tokenizer_of(config: dict[str, Any]) -> pathlib.Path | None:
    """The folder whose tokenizer a recorded run used; None, with a message, if it is gone."""
    named = config["data"].get("tokenizer")
    if not isinstance(named, str):
        return None
    if pathlib.Path(named, "tokenizer.json").is_file():
        return pathlib.Path(named)
    if named != config["start_from"]:  # of which `origin` tells
        say(f"{named}, whose tokenizer the run used, is gone: copy its files into the export.")
    return None


def origin(start_from: str | None) -> pathlib.Path | None:
    """The Hugging Face folder that a chain of runs started from, if it still exists."""
    for _, config in _chain(start_from):
        start_from = config["start_from"]
    if start_from is None or folder.is_folder(start_from):
        return None if start_from is None else pathlib.Path(start_from)
    why = "started from itself" if pathlib.Path(start_from, "checkpoints").is_dir() else "is gone"
    say(f"{start_from} {why}; --like FOLDER names its tokenizer.")
    return None


def _chain(start_from: str | None) -> list[tuple[str, dict[str, Any]]]:
    """The runs that a run began with, the last one first, and their configs; each once."""
    found, seen = [], set()
    while start_from is not None and not folder.is_folder(start_from):
        checkpoints = pathlib.Path(start_from, "checkpoints")
        if not checkpoints.is_dir() or checkpoints.resolve() in seen:
            break
        seen.add(checkpoints.resolve())
        config = recorded(store.choose(checkpoints, item="metadata"))
        found.append((start_from, config))
        start_from = config["start_from"]
    return found


def main(args: list[str]) -> None:
    """Runs the program; a user's mistake ends it with a message and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m train.export",
        description="Writes a run's parameters as a Hugging Face folder.",
    )
    parser.add_argument("run", type=pathlib.Path, help="as runs/nano_dense")
    parser.add_argument("folder", type=pathlib.Path, help="a new or an empty one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--like", type=pathlib.Path, help="folder whose tokenizer is copied")
    parser.add_argument("--adapter", action="store_true", help="LoRA's matrices alone, for peft")
    options = parser.parse_args(args)
    # Parameters are copied from file to file, which needs no accelerator.
    jax.config.update("jax_platforms", "cpu")
    with clean_exits():
        if adapters.is_adapter(options.run):
            if options.like is None:
                parser.error("an adapter is added to its base; write --like FOLDER")
            dtype = jnp.dtype(options.dtype)
            adapters.merge(options.run, options.folder, dtype, options.like)
        elif options.adapter:
            export_adapter(options.run, options.folder, options.like)
        else:
            export(options.run, options.folder, options.dtype, options.like)
        show(f"{options.folder} holds the model of {options.run}")


if __name__ == "__main__":
    main(sys.argv[1:])
