"""Notebooks: both files of a pair say the same, each runs top to bottom, and has its pictures."""

import json
import os
import pathlib
import re
import subprocess
import sys
import types
import zipfile

import pytest

from benchmarks.accelerators import COMPILING
from benchmarks.accelerators_devices import unavailable
from notebooks import pair

ROOT = pathlib.Path(__file__).parents[2]
SHORT = {"steps": "2", "layers, width": "2, 16", "sizes": "(2,)"}
FEWER = {
    "layers=2, width=64, heads=4": "layers=1, width=16, heads=2",
    'glob("*.py")': 'glob("a*.py")',
    "Data(tokenizer=words)": "Data(tokenizer=words, path=json.__file__)",
    'sysconfig.get_path("include")': "json.__file__",
}


def test_there_are_seven():
    names = "compressors fine_tune many_replicas one_line sharded slow_link ten_megabits"
    assert pair.names() == names.split()


@pytest.mark.parametrize("name", pair.names())
def test_both_files_say_the_same(name):
    notebook = json.loads((pair.FOLDER / f"{name}.ipynb").read_text())
    found = [pair.Cell(c["cell_type"], "".join(c["source"])) for c in notebook["cells"]]
    # Else run: python -m notebooks.pair NAME
    assert found == pair.cells((pair.FOLDER / f"{name}.py").read_text())


@pytest.mark.parametrize("name", pair.names())
def test_the_notebook_holds_small_pictures_and_no_error(name):
    file = pair.FOLDER / f"{name}.ipynb"
    outputs = [o for cell in json.loads(file.read_text())["cells"] for o in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert file.stat().st_size < 400_000
    assert "https://colab" not in file.read_text()  # a badge leads nowhere without a repository


def short(name):
    """A notebook's text, with a small model, two steps, and few files to read."""
    text = (pair.FOLDER / f"{name}.py").read_text()
    for variable, value in SHORT.items():
        text = re.sub(f"^{variable} = .*$", f"{variable} = {value}", text, flags=re.MULTILINE)
    for long, few in FEWER.items():
        text = text.replace(long, few)
    assert "\nsteps = 2\n" in text
    return f"import json\n{text}\nassert plt.get_fignums()\n"


def run(folder, text, *arguments, **variables):
    """What a process prints that runs a notebook's text, by itself or by a module."""
    (folder / "notebook.py").write_text(text)
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments, "notebook.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", pair.names())
def test_it_runs_top_to_bottom(name, tmp_path):
    run(tmp_path, short(name))


# The others' replicas are CPU devices, on every machine.
@pytest.mark.parametrize("device", ["t4", "v5e"])
@pytest.mark.parametrize("name", ["compressors", "many_replicas"])
def test_what_runs_on_colabs_accelerators_compiles_for_them(name, device, tmp_path):
    if (reason := unavailable(device)) is not None:
        pytest.skip(reason)
    module = ("-m", "tests.helpers.compiling_notebook", device)
    said = run(tmp_path, short(name), *module, **COMPILING)
    assert int(re.search(rf"^compiled for {device}: (\d+)$", said, re.MULTILINE)[1]) >= 2


@pytest.mark.parametrize("name", pair.names())
def test_in_colab_it_installs_the_zip_that_the_reader_uploads(name, tmp_path, monkeypatch, capsys):
    with zipfile.ZipFile(tmp_path / "any name.zip", "w") as archive:
        archive.writestr("jaxcomp-main/pyproject.toml", "")
        archive.writestr("jaxcomp-main/deeper/pyproject.toml", "")
    files = types.SimpleNamespace(upload=lambda: {"any name.zip": b""})
    colab = types.ModuleType("google.colab")
    colab.files = files
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = []
    monkeypatch.setattr(subprocess, "check_call", lambda command, shell: commands.append(command))
    first = next(x for x in pair.cells((pair.FOLDER / f"{name}.py").read_text()) if x[0] == "code")
    exec(first.source, {})
    folder = str(tmp_path / "checkout" / "jaxcomp-main")
    assert sys.path[0] == folder
    assert [f"'{folder}[train]'" in command for command in commands] == [True]
    assert re.search(r"^jax \d+\.\d+", capsys.readouterr().out, re.MULTILINE)


def test_cells_are_cut_at_their_marks():
    text = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n\n# %%\n# a comment\ny = 2\n"
    assert pair.cells(text) == [
        pair.Cell("markdown", "# Title\n\ntext"),
        pair.Cell("code", "x = 1"),
        pair.Cell("code", "# a comment\ny = 2"),
    ]


def test_a_file_without_cells_is_refused():
    with pytest.raises(ValueError, match="a notebook begins with '# %%'"):
        pair.cells("import jax\n# %%\n")
