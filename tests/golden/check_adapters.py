"""Whether peft reads our adapters, and we peft's, for the models of tests/golden/huggingface.

    PYTHONPATH=. python tests/golden/check_adapters.py write FOLDER
    pip install torch transformers peft    # in an environment of its own; tried with peft 0.21.2
    python tests/golden/check_adapters.py load FOLDER
    PYTHONPATH=. python tests/golden/check_adapters.py merge FOLDER

`load` prints the largest difference of logits, `load` and `merge` raise an AssertionError unless
all weights are the same bit for bit.
"""

import pathlib
import sys

import numpy as np

GOLDEN = pathlib.Path(__file__).with_name("huggingface")
KINDS = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def write(to: pathlib.Path) -> None:
    """Writes an adapter of each model, the model with it merged, and logits."""
    from tests.train.huggingface.test_adapters import thin
    from train.huggingface import adapters
    from train.models.decoder import Decoder
    from train.models.modules import PathRngs, split

    tokens = np.random.default_rng(1).integers(0, 60, (2, 12))
    for kind in KINDS:
        config, params = thin(kind)
        adapters.save(to / kind / "ours", config, params, GOLDEN / kind)
        adapters.merge(to / kind / "ours", to / kind / "ours_merged", np.float32, GOLDEN / kind)
        apply, _ = split(Decoder(config, rngs=PathRngs(0)))
        np.savez(to / kind / "expected.npz", tokens=tokens, logits=apply(params, tokens))


def load(made: pathlib.Path) -> None:
    """Loads, saves and merges ours by peft, and writes an adapter of its own, and that merged."""
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model_of = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for kind in KINDS:
        expected = np.load(made / kind / "expected.npz")
        model = peft.PeftModel.from_pretrained(model_of(GOLDEN / kind), made / kind / "ours")
        with torch.no_grad():
            logits = model.eval()(torch.tensor(expected["tokens"])).logits.numpy()
        print(kind, np.abs(logits - expected["logits"]).max())
        model.save_pretrained(made / kind / "saved")
        files = (made / kind / name / "adapter_model.safetensors" for name in ("ours", "saved"))
        _require_equal(*map(load_file, files))
        merged = model.merge_and_unload().state_dict()
        _require_equal(model_of(made / kind / "ours_merged").state_dict(), merged)
        how = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
        own = peft.get_peft_model(model_of(GOLDEN / kind), peft.LoraConfig(**how))
        own.save_pretrained(made / kind / "theirs")
        own.merge_and_unload().save_pretrained(made / kind / "theirs_merged")


def merge(made: pathlib.Path) -> None:
    """Merges peft's adapters."""
    from train.huggingface import adapters, safetensors

    for kind in KINDS:
        to = made / kind / "theirs_merged_by_us"
        adapters.merge(made / kind / "theirs", to, np.float32, GOLDEN / kind)
        _require_equal(*map(safetensors.read_all, (made / kind / "theirs_merged", to)))


def _require_equal(ours, theirs) -> None:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name in ours:
        assert np.array_equal(np.asarray(ours[name]), np.asarray(theirs[name])), name


if __name__ == "__main__":
    {"write": write, "load": load, "merge": merge}[sys.argv[1]](pathlib.Path(sys.argv[2]))
