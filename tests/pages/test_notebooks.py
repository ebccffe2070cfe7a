"""Notebooks: both files of a pair say the same, each runs top to bottom, and has its pictures."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile

import pytest

from benchmarks.accelerators import COMPILING
from benchmarks.accelerators_devices import unavailable
from notebooks import pair
from tests.helpers.snippets import ROOT

SHORT = {"steps": "2", "layers, width": "2, 16", "sizes": "(2,)"}
FEWER = {
    "layers=2, width=64, heads=4": "layers=1, width=16, heads=2",
    'glob("*.py")': 'glob("a*.py")',
    "Data(tokenizer=words)": "Data(tokenizer=words, path=json.__file__)",
    'sysconfig.get_path("include")': "json.__file__",
}


def test_there_are_eight():
    names = "compressors fine_tune many_replicas one_line sharded slow_link ten_megabits"
    assert pair.names() == [*names.split(), "two_islands"]


@pytest.mark.parametrize("name", pair.names())
def test_both_files_say_the_same(name):
    notebook = json.loads((pair.FOLDER / f"{name}.ipynb").read_text())
    found = [pair.Cell(c["cell_type"], "".join(c["source"])) for c in notebook["cells"]]
    (repository,) = re.findall('^repository = "(.*)"', found[1].source, re.MULTILINE)
    # Else run: python -m notebooks.pair NAME
    assert found == pair.with_first_cell(name, repository)
    assert repository or "https://colab" not in found[0].source  # it would lead nowhere


def test_one_address_is_linked_and_fetched():
    title, first, *_ = pair.with_first_cell("sharded", "https://github.com/me/jaxcomp")
    link = "https://colab.research.google.com/github/me/jaxcomp/blob/main/notebooks/sharded.ipynb"
    assert title.source.endswith(f"[Open in Colab]({link})")
    assert 'repository = "https://github.com/me/jaxcomp"' in first.source


@pytest.mark.parametrize("name", pair.names())
def test_the_notebook_holds_small_pictures_and_no_error(name):
    file = pair.FOLDER / f"{name}.ipynb"
    outputs = [o for cell in json.loads(file.read_text())["cells"] for o in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert file.stat().st_size < 400_000


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


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The source archive that `make wheel` writes."""
    folder = tmp_path_factory.mktemp("archive")
    others = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, folder / "checkout", ignore=others)
    command = (sys.executable, "-m", "build", "-n", "-s", "-o", folder, folder / "checkout")
    subprocess.run(command, check=True, capture_output=True)
    (found,) = folder.glob("jaxcomp-*.tar.gz")
    return found


@pytest.mark.parametrize("name", pair.names())
def test_it_runs_from_an_empty_folder_with_the_archive_alone(name, archive, tmp_path):
    """pip looks at what is installed, in one notebook: their first cells are the same."""
    shutil.copy(archive, tmp_path)
    first = (pair.FOLDER / "first_cell.py").read_text()
    if name != pair.names()[0]:
        first = first.replace("subprocess.check_call", "print")
    ours = (
        "\nimport jaxcomp, train\nassert {jaxcomp.__file__[:9], train.__file__[:9]} == {'HERE'}\n"
    )
    ours = ours.replace("[:9]", f"[:{len(str(tmp_path))}]").replace("HERE", str(tmp_path))
    variables = {"PYTHONPATH": "", "PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1"}
    said = run(tmp_path, first + ours + short(name), **variables)
    assert re.search(r"^jax \d+\.\d+", said, re.MULTILINE)


# The others' replicas are CPU devices, on every machine. Whole steps compile for GPUs in
# tests/benchmarks/test_accelerators.py.
@pytest.mark.parametrize("device", ["t4", "v5e"])
def test_what_runs_on_colabs_accelerators_compiles_for_them(device, tmp_path):
    require_compiled("compressors", device, tmp_path)


def test_replicas_that_a_tpu_simulates_compile_for_it(tmp_path):
    """In minutes, so that CI leaves it out; `make test PYTHON=python3.12` runs it."""
    require_compiled("many_replicas", "v5e", tmp_path)


def require_compiled(name, device, folder):
    if (reason := unavailable(device)) is not None:
        pytest.skip(reason)
    module = ("-m", "tests.helpers.compiling_notebook", device)
    said = run(folder, short(name), *module, **COMPILING)
    assert int(re.search(rf"^compiled for {device}: (\d+)$", said, re.MULTILINE)[1]) >= 2


def test_in_colab_it_takes_the_zip_that_the_reader_uploads(tmp_path, monkeypatch, capsys):
    with zipfile.ZipFile(tmp_path / "any name.zip", "w") as archive:
        project = '[project]\ndependencies = ["a"]\n[project.optional-dependencies]\ntrain = ["b"]'
        archive.writestr("jaxcomp-main/pyproject.toml", project)
        archive.writestr("jaxcomp-main/deeper/pyproject.toml", "")
    colab = types.ModuleType("google.colab")
    colab.files = types.SimpleNamespace(upload=lambda: {"any name.zip": b""})
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    commands = []
    monkeypatch.setattr(subprocess, "check_call", commands.append)
    exec((pair.FOLDER / "first_cell.py").read_text(), {})
    assert sys.path[0] == str(tmp_path / "checkout" / "jaxcomp-main")
    assert [[word for word in command if len(word) == 1] for command in commands] == [["a", "b"]]
    assert re.search(r"^jax \d+\.\d+", capsys.readouterr().out, re.MULTILINE)


def test_cells_are_cut_at_their_marks():
    text = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n\n# %%\n# a comment\ny = 2\n"
    assert pair.cells(text) == [
        pair.Cell("markdown", "# Title\n\ntext"),
        pair.Cell("code", "x = 1"),
        pair.Cell("code", "# a comment\ny = 2"),
    ]


@pytest.mark.parametrize("name", pair.names())
def test_a_cell_that_writes_runs_has_a_new_folder_each_time(name):
    # A second run of the same name would go on from the first one's end, whatever was changed.
    for cell in pair.cells((pair.FOLDER / f"{name}.py").read_text()):
        if re.search(r"\b(run|export)\(", cell.source) and cell.cell_type == "code":
            assert "tempfile.mkdtemp()" in cell.source


def test_a_file_without_cells_is_refused():
    with pytest.raises(ValueError, match="a notebook begins with '# %%'"):
        pair.cells("import jax\n# %%\n")
