"""Reads a Hugging Face folder as the parameters of a run, and writes one."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxcomp.compressors.policies import path_of
from train import checks
from train.data.tokenizer import load_tokenizer
from train.huggingface import safetensors, settings, weights
from train.models import lora
from train.models.decoder import DecoderConfig

TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt chat_template.jinja generation_config.json"
).split()
"""Files that an export copies."""
READS_BYTES = "reads_bytes"
"""Field of an exported config.json: its first 256 tokens are bytes, without a tokenizer."""
_BLOCK = re.compile(r"^block(s(_(?P<first>\d+))?|_(?P<number>\d+))/")


def is_folder(path: str | pathlib.Path) -> bool:
    """Whether a path is a Hugging Face folder and not a run's, according to its config.json."""
    try:
        return "model_type" in checks.json_object(pathlib.Path(path, "config.json"))
    except ValueError:
        return False


def require_no_run(path: str | pathlib.Path) -> None:
    """Raises a ValueError if a path is a run's folder, which has to be exported first."""
    if pathlib.Path(path, "checkpoints").is_dir():
        command = shlex.join(["python", "-m", "train.export", str(path), "FOLDER"])
        raise ValueError(f"{str(path)!r} is a run; write {command}, and take FOLDER.")


def load(folder: str | pathlib.Path, config: DecoderConfig, like: Any) -> Any:
    """Reads parameters straight onto the devices that hold them.

    Files are memory-mapped: apart from its own shards, a process holds one parameter at a time.

    Args:
      folder: The Hugging Face folder.
      config: The run's model; it must be the folder's.
      like: Shapes, dtypes and shardings of the decoder's parameters without LoRA's; see
        `lora.without`.

    Returns:
      The parameters, like `like`.

    Raises:
      ValueError: If the folder is of another model, is damaged, has arrays that the decoder
        lacks, or weights that are not finite numbers.
    """
    kind, found = settings.read(folder)
    settings.require_same(config, found, str(folder))
    arrays = safetensors.read_all(folder)
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    found = [(*layers_of(path_of(key), leaf.shape), leaf) for key, leaf in leaves]
    _require_all(folder, kind, arrays, found)
    _require_tied(folder, kind, config, arrays)
    made = []
    for path, layers, leaf in found:
        read = functools.partial(_read, folder, kind, config, arrays, path)
        made.append(_placed(read, layers, leaf))
    return tree.unflatten(made)


def save(
    folder: str | pathlib.Path,
    config: DecoderConfig,
    params: Any,
    dtype: Any = np.float32,
    like: str | pathlib.Path | None = None,
    tokenizer: str | pathlib.Path | None = None,
    reads_bytes: bool = False,
) -> None:
    """Writes a folder that transformers can load; LoRA is merged into the kernels.

    It appears whole, in one rename, or not at all.

    Args:
      folder: A new folder, or an empty one: another model's files in it would be read with these.
      config: The model.
      params: Its parameters, as JAX or NumPy arrays.
      dtype: Dtype of the files: float32, bfloat16 or float16.
      like: The Hugging Face folder that the run started from. Its tokenizer is copied, and the
        fields of its config.json that are not about the model, such as the first and last token of
        a text.
      tokenizer: A folder whose tokenizer is copied instead.
      reads_bytes: Whether the model has no tokenizer because its tokens are bytes.

    Raises:
      ValueError: If the folder is not new, or Hugging Face has no such architecture.
      OSError: If it cannot be written; then nothing is left of it.
    """
    folder = pathlib.Path(folder)
    require_new(folder)
    params = lora.merged(params, config.lora_scale)
    config = dataclasses.replace(config, lora=0)
    if like is None:
        written = settings.settings_of(config) | _ends_of(tokenizer)
    else:
        kind, there = settings.read(like)
        settings.require_same(config, there, str(like))
        written = checks.json_object(pathlib.Path(like, "config.json")) | {"model_type": kind}
    written |= {READS_BYTES: True} if reads_bytes else {}
    arrays = _theirs(written["model_type"], config, params, np.dtype(dtype))
    write(folder, arrays, written, np.dtype(dtype), like if tokenizer is None else tokenizer)


def _ends_of(tokenizer: str | pathlib.Path | None) -> dict[str, int | None]:
    """The tokens around a text. Where config.json names none, transformers has its own."""
    begin, end = (), ()
    if tokenizer is not None:
        made = load_tokenizer(tokenizer)
        begin, end = made.begin, made.end
    return {"bos_token_id": next(iter(begin), None), "eos_token_id": next(iter(end), None)}


def write(
    folder: pathlib.Path,
    arrays: Iterable[tuple[str, np.ndarray]],
    about: dict[str, Any],
    dtype: np.dtype,
    tokenizer: str | pathlib.Path | None,
) -> None:
    """Writes a new folder of arrays in Hugging Face's names, which have this dtype.

    Args:
      folder: A new folder, or an empty one.
      arrays: The arrays by name.
      about: Its config.json, but for the dtype.
      dtype: Dtype of the arrays.
      tokenizer: A folder whose tokenizer is copied, or None.

    Raises:
      ValueError: If an array has NaN, or became infinite in this dtype: nobody could read it.
    """
    about = {name: value for name, value in about.items() if name != "torch_dtype"}
    about["dtype"] = dtype.name
    with whole(folder) as made:
        safetensors.write_all(made, map(_finite, arrays))
        for name in TOKENIZER if tokenizer is not None else ():
            if pathlib.Path(tokenizer, name).is_file():
                shutil.copyfile(pathlib.Path(tokenizer, name), made / name)
        (made / "config.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")


def _finite(item: tuple[str, np.ndarray]) -> tuple[str, np.ndarray]:
    name, array = item
    if not np.isfinite(array).all():
        raise ValueError(
            f"{name} holds NaN, or numbers too large for {array.dtype}; write --dtype bfloat16. If "
            "that fails too, export a run whose parameters are finite."
        )
    return item


def require_new(folder: pathlib.Path) -> None:
    """Raises a ValueError if there is anything with this name but an empty folder."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
        raise ValueError(f"{folder} is not a new or an empty folder; name another one.")


@contextlib.contextmanager
def whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder beside a new one, whose name it gets once it is whole; removed after an error."""
    folder = folder.absolute()
    made = folder.with_name(f"{folder.name}.part-{secrets.token_hex(4)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        made.mkdir()
        yield made
        for path in (*made.iterdir(), made):
            _to_disk(path)
        made.rename(folder)  # fails if it has got another file meanwhile
    except OSError as error:
        raise OSError(error.errno, f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _to_disk(path: pathlib.Path) -> None:
    """Waits until a file or a folder is on disk, where a crash cannot harm it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _theirs(
    kind: str, config: DecoderConfig, params: Any, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    for path, layer, array in each_layer(params, dtype):
        parts = weights.parted(kind, path, config, array)
        yield from zip(weights.names_of(kind, path, layer), parts, strict=True)


def each_layer(params: Any, dtype: Any) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """The parameters, layer by layer: path inside the block, the layer's number, and the array."""
    for key, leaf in jax.tree.leaves_with_path(params):
        path, layers = layers_of(path_of(key), leaf.shape)
        for place, layer in layers:
            with np.errstate(over="ignore"):  # `write` looks for infinities
                array = np.asarray(leaf if place is None else leaf[place], dtype)
            yield path, layer, array


def layers_of(path: str, shape: tuple[int, ...]) -> tuple[str, list[tuple[int | None, int | None]]]:
    """A parameter's path inside its block, and for each layer its place in the leaf and its number.

    The place is None for an unstacked leaf, the number is None outside blocks.
    """
    block = _BLOCK.match(path)
    if block is None:
        return path, [(None, None)]
    inside, number = path[block.end() :], block["number"]
    if number is not None:
        return inside, [(None, int(number))]
    first = int(block["first"] or 0)
    return inside, [(place, first + place) for place in range(shape[0])]


def _require_all(folder, kind: str, arrays: dict, found: list) -> None:
    """Raises a ValueError if the folder lacks an array, or has an unknown one.

    Numbers are counted before memory is taken for a leaf: config.json may say any size.
    """
    parts = [
        (path, shape, [named(arrays, name, kind) for name in weights.names_of(kind, path, layer)])
        for path, layers, leaf in found
        for place, layer in layers
        for shape in [leaf.shape[place is not None :]]
    ]
    wanted = {name for _, _, names in parts for name in names}
    if missing := sorted(wanted - arrays.keys()):
        raise ValueError(f"{folder} has no array {missing[0]!r}; download it again.")
    for path, shape, names in parts:
        if sum(arrays[name].size for name in names) != math.prod(shape):
            raise _other_model(folder, arrays, names, path, shape)
    wanted.add(weights.head_of(kind))  # beside a tied embedding, too
    if left := [n for n in arrays.keys() - wanted if not weights.NOT_READ.search(n)]:
        raise ValueError(
            f"{folder} has {len(left)} arrays that a {kind} has no place for, like {min(left)!r}; "
            "its config.json is of another model."
        )


def _require_tied(folder, kind: str, config: DecoderConfig, arrays: dict) -> None:
    """Raises a ValueError if a file has an output matrix that a tied model would not use."""
    embed, head = (
        named(arrays, name, kind)
        for name in (*weights.names_of(kind, "embed/embedding", None), weights.head_of(kind))
    )
    if config.tied and head in arrays and not _equal(arrays[embed], arrays[head]):
        raise ValueError(
            f"{folder} has another {head} than {embed}, but its config.json has "
            'tie_word_embeddings=True, or leaves it out: write "tie_word_embeddings": false there '
            "to use both."
        )


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two matrices hold the same numbers, without a copy of more than some rows."""
    rows = max(1, (1 << 24) // max(1, a[:1].size))
    return a.shape == b.shape and all(
        np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows)
    )


def _read(folder, kind: str, config: DecoderConfig, arrays: dict, path: str, layer, shape):
    """One layer of a parameter, with this shape; and the names of its arrays."""
    names = [named(arrays, name, kind) for name in weights.names_of(kind, path, layer)]
    parts = [arrays[name] for name in names]
    if strange := [part.dtype for part in parts if part.dtype not in safetensors.FLOATS]:
        raise ValueError(
            f"{folder} has {', '.join(names)} as {strange[0]}, which are no weights; they must be "
            f"{', '.join(kind.name for kind in safetensors.FLOATS)}."
        )
    try:
        made = weights.from_parts(kind, path, config, parts)
    except ValueError as error:  # parts that do not fit each other
        raise _other_model(folder, arrays, names, path, shape) from error
    if made.shape != shape:
        raise _other_model(folder, arrays, names, path, shape)
    return made, f"{folder}: {', '.join(names)}"


def _other_model(folder, arrays: dict, names: list[str], path: str, shape) -> ValueError:
    return ValueError(
        f"{folder} has {', '.join(names)} of {[arrays[name].shape for name in names]}, which does "
        f"not make {path} {shape}; its config.json is of another model."
    )


def _placed(read: Callable, layers: list, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A leaf on this process's devices, read layer by layer."""

    def span_of(index):
        return tuple(part.indices(n)[:2] for part, n in zip(index, leaf.shape, strict=True))

    places = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    own = {
        span: np.empty([stop - start for start, stop in span], leaf.dtype)
        for span in set(map(span_of, places))
    }
    for place, layer in layers:
        stack = place is not None
        wanted = [span for span in own if not stack or span[0][0] <= place < span[0][1]]
        if not wanted:
            continue
        array, where = read(layer, leaf.shape[stack:])
        for span in wanted:
            cut = array[tuple(slice(*part) for part in span[stack:])]
            held = own[span][place - span[0][0] if stack else ...]
            with np.errstate(over="ignore"):
                held[...] = cut
            if not np.isfinite(held).all():
                raise ValueError(f"{where} holds NaN or infinities; download it again.")
    part = lambda index: own[span_of(index)]
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def named(arrays: dict[str, np.ndarray], name: str, kind: str) -> str:
    """The name of an array, or its shorter name in checkpoints of the bare model.

    OPT's base is two modules, `model.decoder.`, of which the bare model has the second.
    """
    if name.startswith(base := weights.NAMES[kind].base):
        rest, modules = name.removeprefix(base), base.split(".")
        spellings = [".".join([*modules[at:-1], rest]) for at in range(len(modules))]
        return next((each for each in spellings if each in arrays), name)
    return name
