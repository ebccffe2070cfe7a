"""The Makefile, and the files for GitHub: what they say agrees with the project's own."""

import os
import pathlib
import re
import shutil
import subprocess
import tomllib

import yaml

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_names_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    for key in ("version", "license"):
        assert citation[key] == PROJECT[key]
    assert citation["title"] == PROJECT["name"]
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "methods").glob("*.md"))
    papers = citation["references"]
    assert [paper["url"] in pages for paper in papers] == [True] * 4
    first = [paper["authors"][0]["family-names"] for paper in papers]
    assert first == ["Wang", "Lu", "Markov", "Xu"]


def test_the_workflow_tests_both_pairs_by_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    jobs = workflow["jobs"]
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12"]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    pins = (ROOT / "requirements.txt").read_text()
    assert set(re.findall(r'python_version [<>=]+ "(.*)"', pins)) == {pythons[1]}
    commands = [job["steps"][-1]["run"] for job in jobs.values()]
    assert commands == ["make test PYTHON=python${{ matrix.python }}", "make docs"]


def test_make_takes_an_interpreter_whose_path_has_a_space(tmp_path):
    folder, ci = tmp_path / "a b", tmp_path / "checkout" / ".ci"
    for made in (folder, ci):
        made.mkdir(parents=True)
    fake = '#!/bin/sh\nif test "$1" = -c; then echo "$0"; else touch made_with_"$2"; fi\n'
    (folder / "python3").write_text(fake)
    (folder / "python3").chmod(0o755)
    shutil.copy(ROOT / ".ci" / "python", ci)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    # `make test PYTHON=python3.12` hands its own interpreter to a make that a test starts.
    command = ["make", "-f", ROOT / "Makefile", "PYTHON=python3", ".venv/bin/python"]
    subprocess.run(command, cwd=ci.parent, env=env, check=True)
    assert (ci.parent / "made_with_venv").exists()


def test_hooks_run_what_make_format_runs():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^format:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    assert [line.strip() for line in recipe.splitlines()] == [
        f"{entry.replace('.venv/bin', '$(BIN)')} ." for entry in entries
    ]
