"""`make release`: what it checks before it tags."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAKE = """#!/bin/sh
test "$*" = "docs wheel" || exit 9
mkdir -p dist
touch dist/jaxcomp-1.2.0.tar.gz dist/jaxcomp-1.2.0-py3-none-any.whl
"""


@pytest.fixture
def checkout(tmp_path):
    """A repository that is ready for a release, whose `make` writes empty archives."""
    files = {
        "pyproject.toml": '[project]\nversion = "1.2.0"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.0\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2026-11-27)\n",
        ".gitignore": "dist\n",
        "make": MAKE,
        ".ci/release": (ROOT / ".ci" / "release").read_text(),
    }
    (tmp_path / ".ci").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "make").chmod(0o755)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a")


def release(folder, monkeypatch):
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "a")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    command = ["sh", ".ci/release", "./make"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_a_release_is_tagged_once(checkout, monkeypatch):
    assert release(checkout, monkeypatch).returncode == 0
    assert git(checkout, "tag") == "v1.2.0\n"
    again = release(checkout, monkeypatch)
    assert again.returncode == 1 and "there is a tag v1.2.0" in again.stderr


@pytest.mark.parametrize(
    ("file", "old", "new", "text"),
    [
        ("CHANGELOG.md", "(2026-11-27)", "(unreleased)", "needs the line ## 1.2.0 (YYYY-MM-DD)"),
        ("CITATION.cff", "\nversion: 1.2.0", "\nversion: 1.1.0", "needs version: 1.2.0"),
        ("make", "jaxcomp-1.2.0.tar.gz", "", "did not write dist/jaxcomp-1.2.0.tar.gz"),
        ("make", "touch", "exit 3; touch", ""),
    ],
)
def test_what_is_not_ready_is_not_tagged(checkout, monkeypatch, file, old, new, text):
    path = checkout / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    commit(checkout)
    done = release(checkout, monkeypatch)
    assert done.returncode and text in done.stderr
    assert git(checkout, "tag") == ""


def test_what_is_not_committed_is_no_release(checkout, monkeypatch):
    (checkout / "more.py").write_text("")
    assert "there are changes" in release(checkout, monkeypatch).stderr
