"""What the pages tell a reader to type, to read on, and to call."""

import ast
import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import runpy

import pytest

import jaxcomp
from benchmarks import tables
from tests.helpers.snippets import ROOT, run, snippets

DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
# The others use the model, the batches and the mesh that it begins with.
SETUP = snippets((DOCS / "quick_start.md").read_text())[:1]
WITH_PYTHON = [page for page in PAGES if snippets(page.read_text())]


def name_of(page):
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    run(SETUP, names)
    run(snippets(page.read_text()), names)
    if "metrics" in names:
        assert not names["metrics"]["skipped"]


def anchors(page):
    """What a link into a page may name: its headings, as GitHub and MyST write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_the_names_and_arguments_that_a_page_tells_exist(page):
    told = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    for name in re.findall(r"\bjaxcomp(?:\.\w+)+(?![\w/])", " ".join(told)):
        pkgutil.resolve_name(name)
    for text in told:
        with contextlib.suppress(SyntaxError):
            calls = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Call)]
            for call in calls:
                name = ast.unparse(call.func).removeprefix("jaxcomp.")
                if callable(called := getattr(jaxcomp, name, None)):
                    inspect.signature(called).bind_partial(
                        **dict.fromkeys(x.arg for x in call.keywords)
                    )


def test_the_reference_lists_every_public_name():
    page = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)$", page, re.MULTILINE))
    modules = {"planner", "report", "schedules"}
    public = {name for name in vars(jaxcomp) if re.match(r"[a-zA-Z]", name)}
    files = {path.stem for path in (ROOT / "jaxcomp").iterdir()}
    assert public - files - listed - modules == set()
    for module in modules:
        home = getattr(jaxcomp, module)
        own = {
            x.__name__ for x in vars(home).values() if getattr(x, "__module__", "") == home.__name__
        }
        assert {name for name in own if name[0] != "_"} - listed == set()


def test_every_name_of_the_reference_exists_and_is_documented():
    found, home = 0, ""
    for directive, name in re.findall(
        r"^\.\. (currentmodule|autofunction|autoclass):: ([\w.]+)$",
        (DOCS / "api.md").read_text(),
        re.MULTILINE,
    ):
        if directive == "currentmodule":
            # `jaxcomp.report` and `jaxcomp.planner` are names of modules in a room.
            short = name.removeprefix("jaxcomp.")
            home = getattr(jaxcomp, short, None) or importlib.import_module(name)
            continue
        assert getattr(home, name).__doc__, name
        found += 1
    assert found > 100


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_results(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run python -m benchmarks.tables, which writes them"
    # A marker that is not one to `filled`, as of a misspelt name, keeps what it has.
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")
    assert "Not measured yet" not in text


def test_a_figure_that_is_changed_on_a_page_is_put_right():
    text = (DOCS / "bytes.md").read_text()
    assert tables.filled(text.replace("86,299,835", "86")) == text != text.replace("86,299,835", "")


def test_a_table_has_the_rows_that_are_asked_for_and_their_figures(tmp_path, monkeypatch):
    rows = [{"method": name, "replicas": 4, "gradients": g} for name, g in (("a", 2.66), ("bc", 3))]
    (tmp_path / "memory.json").write_text(json.dumps(rows))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    head = "| method | replicas | copies of the gradient |\n|---|---|---|\n"
    assert tables.table("memory", ["b*", "*"]) == f"{head}| `bc` | 4 | 3.0 |\n| `a` | 4 | 2.7 |"
    assert tables.table("memory", []) == f"{head}| `a` | 4 | 2.7 |\n| `bc` | 4 | 3.0 |"
    assert tables.table("memory", ["c"]).startswith("Not measured yet")


def test_the_picture_of_the_rooms_is_drawn_from_the_code():
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "rooms.py"))
    rooms = {path.parent.name for path in ROOT.glob("jaxcomp/*/__init__.py")}
    assert set(drawn["PLACES"]) == rooms - {"launch"}  # which is tied to no other
    assert (ROOT / "docs" / "pictures" / "rooms.svg").read_text() == drawn["draw"]()


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        (":::{grid-item-card} Which method :link: which_method", True),
        ("pace : What a step computes.", True),
        ("| method | loss |", True),
        ("a loss of 3: less than before, by <code>x[:, 1](y)</code> :", False),
    ],
)
def test_markup_that_a_page_shows_as_text_is_found(tmp_path, text, is_lost):
    check = runpy.run_path(str(DOCS / "check_site.py"))
    (tmp_path / "page.html").write_text(f"<body>:::<article><p>{text}</p></article></body>")
    assert bool(check["lost_markup"](tmp_path)) == is_lost
