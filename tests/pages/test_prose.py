"""Plain English: prose has none of `refused.txt`, and names in code none of `refused_names.txt`."""

import ast
import re

import pytest

from tests.helpers.snippets import ROOT


def refused(file):
    """Phrase to what one writes instead."""
    lines = (ROOT / "tests" / "pages" / file).read_text().splitlines()
    return dict(line.split(" => ") for line in lines if line and line[0] != "#")


REFUSED, NAMES = refused("refused.txt"), refused("refused_names.txt")
ROOMS = ["README.md", "CONTRIBUTING.md", "docs", "jaxcomp", "train", "benchmarks", "notebooks"]
# Rooms whose names are under the linter, too.
NAMED = ["jaxcomp", "train"]


def paragraphs(text):
    """Prose with a line for each paragraph, item and row of a table, and without code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"``?[^`\n]*``?", "`x`", text)
    return re.sub(r"(?<!\n)\n[ ]*(?![\n|\-#*]|\w+: )", " ", text)


def prose(path):
    """What a reader reads of a file: all of a page, the strings and the comments of a program."""
    source = path.read_text()
    if path.suffix == ".md":
        return paragraphs(source)
    nodes = ast.walk(ast.parse(source))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    texts = [text for text in texts if isinstance(text, str) and " " in text]
    comments = "\n".join(re.findall(r"^ *# ?(.*)$", source, re.MULTILINE))
    return "\n\n".join(paragraphs(text) for text in [*texts, comments])


def complaints(text):
    """The refused phrases of a text, each with what stands around it and what to write."""
    found = []
    for phrase, instead in REFUSED.items():
        for match in re.finditer(phrase, text, re.MULTILINE):
            around = text[max(0, match.start() - 30) : match.end() + 30]
            found.append(f"{around!r}: write {instead}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_reader_has_to_decode_a_phrase(room):
    files = [ROOT / room] if (ROOT / room).is_file() else [*(ROOT / room).rglob("*")]
    files = [file for file in files if file.suffix in (".py", ".md") and "_build" not in file.parts]
    found = [f"{file.relative_to(ROOT)}: {x}" for file in files for x in complaints(prose(file))]
    assert not found, "\n".join(found)


def names(source):
    """The names that a program gives to things: functions, classes, arguments and variables."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.ExceptHandler(name=str()):
                yield node.name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def undecoded(source):
    """The refused names of a program, each with what to write."""
    return [
        f"{name}: write {instead}"
        for name in dict.fromkeys(names(source))
        for pattern, instead in NAMES.items()
        if re.search(pattern, name.lower())
    ]


@pytest.mark.parametrize("room", NAMED)
def test_no_reader_has_to_decode_a_name(room):
    files = [ROOT / room] if (ROOT / room).is_file() else [*(ROOT / room).rglob("*.py")]
    found = [f"{file}: {x}" for file in files for x in undecoded(file.read_text())]
    assert files and not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "def of_each(x): ...",
        "_of_part = 1",
        "lambda told: told",
        "class Guest: ...",
        "self.is_guest = True",
        "with open(x) as shelf: ...",
        "try: ...\nexcept OSError as home: ...",
        "import numpy as wards",
        "def spread(x): ...",
    ],
)
def test_what_names_once_were_is_refused(source):
    assert undecoded(source)
    assert not undecoded("def batch_specs_of(offset, homepage, *, metric): ...")


@pytest.mark.parametrize(
    "text",
    [
        "each method at the rate that most seeds ran at, of several such at the best",
        "4-bit Adam is near dense Adam by\nfour bits",
        "from scratch that ends lower",
        "Eight bits end where dense Adam does",
        "**Exact** travel norms, biases",
        "not when the network is not what you wait for",
        "Quality breaks by H",
        "Its step is not flat from 1 Gbit/s up",
        "of others the dearest counts",
        "It is shown. Of SLAMB the mean of 8 steps is shown, of the others the median",
        "`train_step` and `local_params` differentiate at the sum",
        "What travels is the sign of each entry",
        "The drift since the last meeting is kept",
        "Its buffer is laid out anew at each resize",
        "It costs 2 ms in the mean over the run",
        "A replica whose gradient is infinite leaves its step out",
    ],
)
def test_what_the_pages_once_said_is_refused(text):
    assert complaints(paragraphs(text))


def test_code_and_plain_words_are_not_refused():
    text = (
        "Of course, 4 bits match.\n\n```python\nx = 1  # by four bits\n```\n\n`by 4 bits`, by hand."
    )
    assert not complaints(paragraphs(text))
