"""Training data of a run: text, or images with labels."""

import dataclasses
from typing import Literal

from train import checks


@dataclasses.dataclass(frozen=True)
class Data:
    """The text, and how much of it a step reads."""

    path: str | None = None
    """File or folder, read recursively: text, and rows of .jsonl, .ndjson, .json, .csv, .tsv and
    .parquet; or a folder saved by the package datasets. None: the source of Python's standard
    library."""
    huggingface: str | None = None
    """Name or local path of a Hugging Face data set; needs pip install -e '.[huggingface]'."""
    huggingface_subset: str | None = None
    """Subset (configuration) of the data set, if it has several."""
    huggingface_split: str = "train"
    """Split of the data set to read; validation rows are held out of it."""
    column: str = "text"
    """Field of a row that holds the text, or the messages of a chat. An error without rows."""
    tools: str | None = None
    """Field of a row that holds the functions which a chat may call, for the chat template: a list
    of JSON schemas, or its text. A row without it has none."""
    tokenizer: str | None = None
    """Hugging Face folder with a tokenizer.json; None: the folder of the pretrained model, or bytes
    as tokens without one."""
    packed: bool = False
    """Whether to pack whole documents into sequences, without attention between them, each once per
    epoch. Chats need it. False: sequences begin anywhere in the text."""
    cache: str | None = None
    """Folder for the tokens, which several runs may share; None: the run's own."""
    batch: int = 32
    """Sequences of one optimizer step, over all replicas and microbatches."""
    validation_fraction: float = 0.1
    """Share of the text held out for validation, in (0, 1); whole files if there are several."""

    def __post_init__(self):
        _check_sizes(self)
        if self.path is not None and self.huggingface is not None:
            raise ValueError(
                f"data.path={self.path!r} and data.huggingface={self.huggingface!r} exclude each "
                f"other; set one of them to None."
            )


@dataclasses.dataclass(frozen=True)
class Images:
    """The images, and how many of them a step reads."""

    form: Literal["digits", "cifar10", "folder"] = "digits"
    """Format: scikit-learn's file digits.csv.gz, 1,797 digits of 8x8; the folder of CIFAR-10's
    binary version; or one folder per class, like ImageNet."""
    path: str | None = None
    """File or folder; None, for digits only: the one in the installed scikit-learn."""
    cache: str | None = None
    """Folder that records which images can be read, which several runs may share; None: the run's
    own."""
    batch: int = 32
    """Images of one optimizer step, over all replicas and microbatches."""
    validation_fraction: float = 0.1
    """Share of the images held out for validation, in (0, 1), if the data set has no such part."""

    def __post_init__(self):
        _check_sizes(self)
        if self.path is None and self.form != "digits":
            raise ValueError(
                f"data.form={self.form!r} needs data.path, the folder that holds the images, since "
                "nothing is downloaded; write --data.path FOLDER."
            )


def _check_sizes(data: Data | Images) -> None:
    checks.require_types(data, "data.")
    checks.at_least(1, data, "batch", prefix="data.")
    if data.path == "":  # to pathlib it is the current folder
        raise ValueError("data.path='' names nothing; write --data.path FOLDER, or . for this one.")
    if not 0 < data.validation_fraction < 1:
        raise ValueError(
            f"data.validation_fraction={data.validation_fraction} must be between 0 and 1; write "
            "0.1."
        )
