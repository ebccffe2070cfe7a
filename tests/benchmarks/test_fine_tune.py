"""The table of what fine-tuning sends."""

from benchmarks.studies import fine_tune

CONFIG = """
from train.config import Config, Optimizer
from train.models.decoder import DecoderConfig


def get_config():
    model = DecoderConfig(layers=1, width=16, heads=2, context=8, scan=True)
    return Config("tiny", 10, Optimizer("sgd(learning_rate)", 1.0), per_layer=False, model=model)
"""


def test_lora_sends_its_matrices_alone(monkeypatch, tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(CONFIG)
    method = "LoRA, dense"
    monkeypatch.setattr(fine_tune, "LORA", {method: fine_tune.LORA[method]})
    (row,) = fine_tune.of_lora(str(tmp_path / "tiny.py"), replicas=2)
    of_width = 16 + 48, 16 + 16, 16 + 64, 64 + 16  # inputs and outputs of the four matrices
    assert row["trained"] == fine_tune.LORA_RANK * sum(of_width)
    assert row["sent_bytes"] == 4 * row["trained"]
    assert method in capsys.readouterr().out
