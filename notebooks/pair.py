"""`python -m notebooks.pair [NAME ...]`: makes NAME.ipynb of NAME.py; all of them by default.

The .py is the one to edit. `# %%` begins a cell of code, `# %% [markdown]` one of text, whose lines
are comments. `first_cell.py` comes after each title: it finds the checkout, and shows nothing in
one. A notebook whose other code has changed is run, which needs pip install -e '.[notebooks]'; else
what its code has shown stays.

JAXCOMP_REPOSITORY=https://github.com/OWNER/jaxcomp makes notebooks that fetch themselves from there
in Colab, with a link to Colab below their titles.
"""

import argparse
import os
import pathlib
import re
import textwrap
from typing import NamedTuple

FOLDER = pathlib.Path(__file__).parent
_BEGINNING = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


class Cell(NamedTuple):
    """One cell of a notebook."""

    cell_type: str  # "code" or "markdown"
    source: str


def names() -> list[str]:
    """The notebooks, in their order."""
    return sorted(file.stem for file in FOLDER.glob("*.py") if _BEGINNING.match(file.read_text()))


def cells(text: str) -> list[Cell]:
    """Cuts a .py into cells.

    Raises:
      ValueError: If it does not begin with a cell.
    """
    before, *parts = _BEGINNING.split(text)
    if before or not parts:
        raise ValueError(f"the text begins with {text[:20]!r}; a notebook begins with '# %%'.")
    found = []
    for mark, body in zip(parts[::2], parts[1::2], strict=True):
        if mark:
            found.append(Cell("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            found.append(Cell("code", body.strip()))
    return found


def with_first_cell(name: str, repository: str) -> list[Cell]:
    """The cells of a notebook's .py, with `first_cell.py` for a repository after the title."""
    title, *rest = cells((FOLDER / f"{name}.py").read_text())
    first = (FOLDER / "first_cell.py").read_text().strip()
    first = first.replace('repository = ""', f'repository = "{repository}"')
    if repository:
        where = (
            repository.removeprefix("https://github.com/") + f"/blob/main/notebooks/{name}.ipynb"
        )
        link = f"[Open in Colab](https://colab.research.google.com/github/{where})"
        title = title._replace(source=f"{title.source}\n\n{link}")
    return [title, Cell("code", first), *rest]


def make(name: str) -> None:
    """Writes a notebook with what its cells show, as they run or have run; not if one fails."""
    import nbclient
    import nbformat

    kinds = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    file = FOLDER / f"{name}.ipynb"
    found = with_first_cell(name, os.environ.get("JAXCOMP_REPOSITORY", ""))
    notebook = nbformat.v4.new_notebook(
        # Ids are random by default, and would differ after every run.
        cells=[kinds[kind](source, id=f"cell-{n}") for n, (kind, source) in enumerate(found)],
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3"},
            # The kernel says it too, but is not asked where no code has changed.
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        },
    )
    code_of = lambda notebook: [cell for cell in notebook.cells if cell.cell_type == "code"]
    old = code_of(nbformat.read(file, as_version=4)) if file.exists() else []
    new = code_of(notebook)
    if [cell.source for cell in old[1:]] == [cell.source for cell in new[1:]]:
        for before, after in zip(old, new, strict=True):
            after.update(outputs=before.outputs, execution_count=before.execution_count)
    else:
        nbclient.NotebookClient(notebook, timeout=None, record_timing=False).execute()
    for cell in new:  # progress and warnings are of this machine
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, file)


def main() -> None:
    """Makes the notebooks that are named."""
    parser = argparse.ArgumentParser(description=textwrap.shorten(__doc__, 100, placeholder=""))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    chosen = parser.parse_args().names or names()
    if unknown := set(chosen) - set(names()):
        parser.error(f"no {', '.join(sorted(unknown))}; write some of {', '.join(names())}")
    for name in chosen:
        make(name)
        print(f"{FOLDER / name}.ipynb", flush=True)


if __name__ == "__main__":
    main()
