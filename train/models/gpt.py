"""The decoder by its old names."""

from train.models.decoder import STACKED as STACKED
from train.models.decoder import Decoder as GPT  # noqa: F401
from train.models.decoder import DecoderConfig as GPTConfig  # noqa: F401
