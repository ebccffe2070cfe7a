"""Folders of Hugging Face."""

import json

from hypothesis import strategies as st

from tests.helpers.fuzzing import fuzz, objects, refused
from train import checks
from train.huggingface import settings

GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_head": 2, "n_layer": 1}
LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2}
LLAMA |= {"num_hidden_layers": 1, "intermediate_size": 16, "max_position_embeddings": 16}
LLAMA |= {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}


@fuzz(st.one_of(objects(GPT2), objects(LLAMA)))
def test_settings_of_hugging_face(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps(value))
    if (found := refused(settings.read, tmp_path)) is not None:
        checks.of_types(found[1])
