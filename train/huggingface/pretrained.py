"""A model that the Hugging Face folder describes with which a run begins."""

import dataclasses
from typing import Literal

from train.huggingface import folder, settings
from train.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """The decoder of the Hugging Face folder `start_from`, and what a run may choose about it."""

    context: int = 1024
    """Tokens of a sequence, at most as many as the model is made for."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations and matrix products; parameters are float32."""
    scan: bool = True
    """Whether one program runs all blocks in turn, see `DecoderConfig`."""
    remat: bool = True
    """Whether the backward pass computes each block anew, and only inputs of blocks are kept."""
    lora: int = 0
    """Rank of what is trained in place of the blocks' matrices, see `DecoderConfig`."""
    lora_alpha: float = 16.0
    """Times the rank's inverse, how much that counts."""

    def of(self, path: str) -> DecoderConfig:
        """The model of a folder.

        Raises:
          ValueError: If it is no Hugging Face folder, of no model that the decoder computes, or of
            one that is made for fewer tokens.
        """
        if not folder.is_folder(path):
            raise ValueError(
                f"start_from={path!r} is no Hugging Face folder: it has no config.json with a "
                "model_type. Name one, or write model=DecoderConfig(...) in the config file."
            )
        _, found = settings.read(path)
        return dataclasses.replace(found, **dataclasses.asdict(self))
