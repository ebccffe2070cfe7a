"""The tasks of `benchmarks.scale`: methods, models of growing size, their text and recipe.

The text of all but the smallest are sources of installed packages, in byte-pair tokens. The
packages are those of `pip install -e '.[train,huggingface]'` whose pinned version, and whose
source, is the same for all Python versions that requirements.txt knows. So every machine with these
pins has the same text: a row keeps its sha256, that of the tokenizer included.
"""

import dataclasses
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import methods
from configs import nano_dense
from train.config import Config, Data
from train.data import token_files
from train.models.decoder import DecoderConfig

METHODS: dict[str, methods.Method] = {
    **{
        name: methods.METHODS[known]._replace(rates=(rate,))
        for name, known, rate in (
            # nano's best rate, not tuned for pico
            ("dense Adam", "dense Adam", 6e-3),
            ("8 bits", "8-bit Adam", 6e-3),
            ("4 bits", "4-bit Adam", 6e-3),
            ("top_k", "top_k Adam", 3e-3),
            ("1 bit", "sign Adam", 3e-3),
            ("sharded Adam, 4 bits", "sharded Adam, G4D4", 6e-3),
            ("QSDP, 8 bits", "QSDP W8G8", 6e-3),
            ("QSDP, 4 bits, learned", "QSDP W4G4, learned", 6e-3),
            *(
                (f"QSDP, {bits} bits, embedding 8", f"QSDP W{bits}G4, learned, embedding 8", 6e-3)
                for bits in (3, 4, 5, 6)
            ),
            (
                "QSDP, 4 bits, embedding's weights 8",
                *("QSDP W4G4, learned, embedding's weights 8", 6e-3),
            ),
            ("CocktailSGD, no delay, 88x", "CocktailSGD, no delay, 88x", 6e-3),
            ("CocktailSGD, no delay, 10x", "CocktailSGD, no delay, 10x", 6e-3),
            ("CocktailSGD, 88x", "CocktailSGD", 6e-3),
            *((f"CocktailSGD, {x}", f"CocktailSGD, {x}", 6e-3) for x in ("10x", "32x", "140x")),
            ("CocktailSGD, no compression", "CocktailSGD, no compression", 6e-3),
            ("dense LAMB", "LAMB", 1.4e-2),
            ("dense SGD", "dense momentum SGD", 0.1),
            ("0/1 Adam", "0/1 Adam, warm-up, variances of 8 bits", 6e-3),
            ("SLAMB", "SLAMB", 1.4e-2),  # nano's 2e-2 diverges here
            *(
                (f"SLAMB, mean variance{x}", f"SLAMB, mean variance{x}", 1.4e-2)
                for x in ("", ", 8 bits", ", 4 bits")
            ),
            ("1-bit Adam", "1-bit Adam, 1200 dense steps", 6e-3),  # 15%, as on nano
        )
    },
    **methods.PICO,
}
# Dense training by what its inner optimizer is called in an update; the first that matches.
BASELINES = {
    "dense Muon": "muon|muloco|dion",
    "dense LAMB": "lamb",
    "dense SGD": r"\bsgd\(learning_rate",
    "dense Lion": "lion",
    "dense Adam": "adam|demo",
}


def baseline_of(method: methods.Method) -> str:
    """The name of dense training with the method's inner optimizer."""
    for name, inside in BASELINES.items():
        if re.search(inside, method.update):
            return name
    raise ValueError(f"no baseline is known for {method.update!r}; add one to BASELINES.")


END = "<|endoftext|>"
TEXT = pathlib.Path("runs/scale")
TEXTS = {  # folder: packages
    "text": (
        *("matplotlib", "fonttools", "optax", "orbax-checkpoint", "tyro", "rich", "pygments"),
        *("treescope", "etils", "simplejson", "pillow"),
        *("pandas", "pyarrow", "datasets", "huggingface_hub", "fsspec"),
    ),
    "fine_tune_text": ("mypy", "hypothesis", "pytest"),  # of the extra test
}


def sources(name: str) -> Iterator[tuple[str, str]]:
    """Name and text of each Python file of a text's packages, as installed."""
    for package in TEXTS[name]:
        files = importlib.metadata.distribution(package).files or ()
        for file in sorted(file for file in files if file.suffix == ".py"):
            try:
                yield file.as_posix(), file.read_text("utf-8")
            except UnicodeDecodeError:
                continue


def write_tokenizer(folder: pathlib.Path, texts: Iterator[str], vocab: int) -> None:
    """Trains a byte-pair code on texts, and writes it in the format of Hugging Face folders."""
    import tokenizers  # of the extra huggingface, which no other part of this file needs
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")


def packages(name: str, vocab: int, batch: int, folder: pathlib.Path) -> Data:
    """Writes a text, a tokenizer of `vocab` tokens, and the text's tokens, each once.

    Args:
      name: A key of `TEXTS`.
      vocab: Tokens of the byte-pair code, which is trained on the first of `TEXTS`.
      batch: Sequences of a step.
      folder: Where text, tokenizers and tokens are kept.

    Returns:
      The `data` of a config; `train` reads it.
    """
    text, tokenizer = folder / name, folder / f"tokenizer_{vocab}"
    if not text.is_dir():
        unfinished = folder / f"{name}.unfinished"
        for path, content in sources(name):
            file = unfinished / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        unfinished.rename(text)
    if not (tokenizer / "tokenizer_config.json").is_file():
        write_tokenizer(tokenizer, (content for _, content in sources("text")), vocab)
    cache = folder / "tokens"
    made = Data(path=str(text), tokenizer=str(tokenizer), cache=str(cache), batch=batch)
    token_files.prepare(made, cache, vocab)
    return made


class Before(NamedTuple):
    """A run of dense Adam on another task, whose last parameters a run starts from."""

    task: str
    steps: int
    rate: float


class Size(NamedTuple):
    """A task of one size.

    Attributes:
      model: The model.
      steps: Optimizer steps.
      batch: Sequences of a step, over all replicas.
      eval_batches: Batches of one evaluation.
      centres: The middle of trials of rates, by dense baseline; none: rates are not tuned so.
      recipe: What the methods' inner optimizers become, see `by_recipe`.
      text: A key of `TEXTS`.
      before: What a run starts from; none: from random parameters.
      trial: Steps of a trial of a rate; none: half of `steps`. Shorter ones prefer lower rates.
    """

    model: DecoderConfig
    steps: int
    batch: int
    eval_batches: int
    centres: dict[str, float] = {}
    recipe: dict[str, str] = {}
    text: str = "text"
    before: Before | None = None
    trial: int | None = None


def _centres(adam: float, muon: float) -> dict[str, float]:
    return {
        "dense Adam": adam,
        "dense Muon": muon,
        "dense LAMB": 4 * adam,
        "dense SGD": 100 * adam,
        "dense Lion": adam,
    }


# As large models are trained: decay, and clipping of what the optimizer sees: the mean gradient, or
# with local moments the replica's own.
CLIP, DECAY = "clip_by_global_norm(1.0)", "weight_decay=0.1"
_OWN = "zero_one_adam|one_bit_adam|slamb|dion|demo|muloco"
RECIPE = {
    # Muon's other leaves are not clipped a second time.
    r"(?<!others=rare_rows\()\b(adam|lamb)\(learning_rate\)": f"chain({CLIP}, "
    rf"\1w(learning_rate, {DECAY}))",
    "lambw": "lamb",  # which decays already
    r"\boptax\.contrib\.muon\(learning_rate\)": f"chain({CLIP}, muon(learning_rate, {DECAY}))",
    r"\blion\(learning_rate\)": f"chain({CLIP}, lion(learning_rate, {DECAY}))",
    re.escape(methods.MUON_RARE_ROWS): f"chain({CLIP}, "
    + methods.MUON_RARE_ROWS.replace("rate, others", f"rate, {DECAY}, others")
    + ")",
    r"\bsgd\(learning_rate, momentum=0.9\)": rf"chain({CLIP}, \g<0>)",
    # Methods with moments of their own.
    rf"(^|\bby_kind\()({_OWN})\(learning_rate, axis_name": rf"\g<0>, {DECAY}",
    rf"^({_OWN})\(.*$": rf"chain({CLIP}, \g<0>)",
    rf"\bby_kind\((({_OWN})\([^()]*\))": rf"by_kind(chain({CLIP}, \1)",
    "freeze_step=1200": "freeze_step=warmup_steps",
}
# The same with second moments that remember 20 steps, not 1,000: for batches of so many tokens that
# each row of an embedding has a gradient in most steps.
SHORT_MEMORY = RECIPE | {
    rf"\bmuon\(learning_rate, {DECAY}\)": f"muon(learning_rate, {DECAY}, others={methods.ADAM})",
    r"\bmuloco\(learning_rate, axis_name": rf"\g<0>, others=rare_rows({methods.ADAM}, axis_name)",
    r"\b(adamw?|lamb)\(learning_rate": r"\g<0>, b2=0.95",
    r"\b(zero_one_adam|one_bit_adam|slamb)\(learning_rate, axis_name": r"\g<0>, b2=0.95",
}
MICRO = DecoderConfig(layers=2, width=96, heads=3, context=32, vocab=8192)
LARGE = {"heads": 12, "context": 512, "dtype": "bfloat16"}

SIZES = {
    # Nano's bytes and steps, with a smaller model and many more steps.
    "pico": Size(DecoderConfig(layers=2, width=64, heads=2, context=64), 8000, 32, 64),
    "micro": Size(MICRO, 2000, 16, 64, _centres(adam=2e-3, muon=8e-3), RECIPE),
    # Four times the tokens a step: more replicas see the same rows of the embedding.
    "micro_batch_64": Size(
        *(MICRO, 2000, 64, 16, _centres(adam=4e-3, muon=1.6e-2), SHORT_MEMORY), trial=500
    ),
    # Second moments remember 20 steps, not 1,000.
    "micro_b2_95": Size(
        *(MICRO, 2000, 16, 64, _centres(adam=2e-3, muon=8e-3), SHORT_MEMORY), trial=500
    ),
    # A larger model, and all else as for micro.
    "3m": Size(
        DecoderConfig(layers=4, width=192, heads=6, context=32, vocab=8192),
        *(2000, 16, 64),
        _centres(adam=2e-3, muon=8e-3),
        SHORT_MEMORY,
        trial=500,
    ),
    # Compression begins after a quarter of the steps, which are dense.
    "micro_dense_start": Size(
        *(MICRO, 1500, 16, 64, _centres(adam=2e-3, muon=8e-3), SHORT_MEMORY),
        before=Before("micro_b2_95", steps=500, rate=2e-3),
        trial=375,
    ),
    # A model that has stopped to learn goes on with the source of other packages.
    "micro_fine_tune": Size(
        *(MICRO, 1000, 16, 64, _centres(adam=5e-4, muon=2e-3), RECIPE),
        text="fine_tune_text",
        before=Before("micro", steps=8000, rate=2e-3),
    ),
    "34m": Size(
        DecoderConfig(layers=8, width=512, vocab=16384, **(LARGE | {"heads": 8})),
        *(2240, 32, 8),
        _centres(adam=2e-3, muon=4e-3),
        RECIPE,
    ),
    # GPT-2's smallest.
    "124m": Size(
        DecoderConfig(layers=12, width=768, vocab=50257, **LARGE),
        *(2240, 32, 8),
        _centres(adam=1e-3, muon=2e-3),
        RECIPE,
    ),
}


def data_of(size: Size) -> Data:
    """Nano's text in bytes, or sources of packages in the model's number of tokens."""
    if size.model.vocab == 256:
        return dataclasses.replace(nano_dense.get_config().data, batch=size.batch)
    return packages(size.text, size.model.vocab, size.batch, TEXT)


def by_recipe(method: methods.Method, name: str) -> methods.Method:
    """A method with the inner optimizers of the size's recipe in place of plain ones."""
    update = method.update
    for plain, full in SIZES[name].recipe.items():
        update = re.sub(plain, full, update)
    return method._replace(update=update)


def config_of(
    name: str, method: methods.Method, seed: int, steps: int, rate: float | None = None
) -> Config:
    """The run of one row; at the method's own rate unless there is another."""
    size, nano = SIZES[name], nano_dense.get_config()
    return dataclasses.replace(
        nano,
        name=name,
        steps=steps,
        seed=seed,
        qsdp=method.qsdp,
        model=size.model,
        data=data_of(size),
        optimizer=dataclasses.replace(
            nano.optimizer,
            update=method.update,
            learning_rate=rate or method.rates[0],
            warmup_steps=steps // 10,
            final_fraction=0.0,
        ),
        eval_batches=size.eval_batches,
    )
