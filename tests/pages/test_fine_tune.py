"""The commands of the page on fine-tuning, on two processes and a tiny model."""

import os
import re
import shlex
import subprocess
import sys

from tests.helpers.snippets import ROOT

TINY = "--steps 2 --optimizer.warmup-steps 1 --model.context 16 --accumulate 1 --data.batch 4"
TINY += " --eval-batches 1 --optimizer.update local_steps(sgd(learning_rate),axis_name,every=2)"


def test_the_commands_of_the_page_end_with_a_text(tmp_path):
    (tmp_path / "pythia-160m").symlink_to(ROOT / "tests" / "golden" / "huggingface" / "gpt2")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "words.txt").write_text("a few words, again and again\n" * 60)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = (ROOT / "docs" / "fine_tune.md").read_text()
    train, export, generate = re.findall(r"^    (python -m train\..*)$", page, re.MULTILINE)
    said = [
        run(train.replace("--hosts hosts.txt", "--local 2") + f" --replicas 2 {TINY}", tmp_path),
        run(export, tmp_path),
        run(generate.replace("Once upon a time", "Once"), tmp_path),
    ]
    assert "tuned holds the model of runs/fine_tune_cocktail" in said[1]
    assert said[2].startswith("Once") and len(said[2]) > len("Once\n")


def run(command, folder):
    python, *args = shlex.split(command)
    assert python == "python"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
