"""A model from the Hugging Face folder that a run starts from."""

import dataclasses
import pathlib
from typing import Literal

from train import checks
from train.huggingface import adapters, folder, settings
from train.models.decoder import DecoderConfig

_USUAL = 1024  # tokens: what a model is made for may not fit


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """The decoder of the Hugging Face folder `start_from`, and what a run may choose."""

    context: int = 0
    """Tokens of a sequence, at most the model's maximum; 0: that maximum, at most 1,024."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations and matrix products; parameters are float32."""
    scan: bool = True
    """Whether to scan over the blocks, see `DecoderConfig`."""
    remat: bool = True
    """Whether to recompute each block in the backward pass and keep only the inputs of blocks."""
    lora: int = 0
    """Rank of LoRA for the blocks' matrices, see `DecoderConfig`."""
    lora_alpha: float = 16.0
    """LoRA's alpha: its product is scaled by alpha / rank."""

    def decoder_of(self, path: str) -> DecoderConfig:
        """The model of a folder.

        Raises:
          ValueError: If it is not a Hugging Face folder, its model is not supported, or the model's
            maximum context is too short.
        """
        folder.require_no_run(path)
        adapters.require_none(path)
        if not folder.is_folder(path):
            raise ValueError(
                f"start_from={path!r} is no Hugging Face folder: it has no config.json with a "
                "model_type. Name one, or write model=DecoderConfig(...) in the config file."
            )
        _, found = settings.read(path)
        chosen = dataclasses.asdict(self)
        chosen["context"] = self.context or min(_USUAL, found.positions)
        return dataclasses.replace(found, **chosen)


def tokenizer_of(path: str | pathlib.Path, vocab: int) -> str | pathlib.Path | None:
    """The folder, for its tokenizer; None if it has none, and the model reads bytes."""
    if pathlib.Path(path, "tokenizer.json").exists():
        return path
    about = checks.json_object(pathlib.Path(path, "config.json"))
    return None if vocab == 256 or about.get(folder.READS_BYTES) is True else path
