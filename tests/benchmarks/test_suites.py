"""The suites and studies as a reader meets them: their list, their commands, and their rows."""

import argparse
import importlib.util
import inspect
import re
import shlex

import pytest

from benchmarks import __main__ as suites
from benchmarks import rows, studies
from tests.helpers.snippets import ROOT

MOST_MODULES = 42
READ = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "configs/**/*.py", "benchmarks/**/*.py"]
COMMAND = re.compile(r"-m\s+(benchmarks[\w.]*)((?:[^`\n]|\n(?!\n))*)")


class Parsed(Exception):
    """Stops a program where it reads its command line, with its parser."""


def commands():
    """Module and words of each command that a page, a config or a program names."""
    for path in sorted(path for pattern in READ for path in ROOT.glob(pattern)):
        text = path.read_text().replace("\\\\\n", " ").replace("\\\n", " ")
        # Of inline code as far as its end, which may be in the next line; of others the line.
        for match in COMMAND.finditer(text):
            inline = text[: match.start()].rpartition("\n")[2].count("`") % 2
            words = match[2] if inline else match[2].partition("\n")[0].partition("#")[0]
            words = re.sub(r"[\[\]]|,$", "", words)
            if words.count('"') % 2:  # the end of a string of Python
                words = words.rpartition('"')[0]
            yield pytest.param(
                match[1].rstrip("."), words, id=f"{path.name}:{match[1]}{words[:40]}"
            )


@pytest.fixture
def parser_of(monkeypatch):
    """The parser of a program, stopped before it does anything."""

    def stop(parser, *_, **__):
        raise Parsed(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)

    def of(program, words):
        main = importlib.import_module(program).main
        with pytest.raises(Parsed) as stopped:
            main(words) if inspect.signature(main).parameters else main()
        return stopped.value.args[0]

    return of


def test_the_list_has_five_suites_with_what_they_need_and_take(capsys):
    suites.main([])
    text = capsys.readouterr().out
    assert list(suites.SUITES) == ["loss", "links", "codes", "accelerators", "peers"]
    for name, suite in suites.SUITES.items():
        assert f"{name:14s}{suite.answers}" in text
        assert f"needs {suite.needs}" in text and f"takes {suite.takes}" in text
    with pytest.raises(ValueError, match="got suite 'code', need one of loss, links, codes"):
        suites.main(["code"])


@pytest.mark.parametrize("name", suites.SUITES)
def test_a_suite_reads_the_options_of_its_program(name, parser_of, monkeypatch):
    seen = []
    program = importlib.import_module(suites.SUITES[name].program)
    monkeypatch.setattr(program, "main", lambda argv: seen.append(argv))
    suites.main([name, "--json", "a"])
    assert seen == [["--json", "a"]]


def test_modules_are_few_and_each_study_has_its_question():
    modules = list((ROOT / "benchmarks").rglob("*.py"))
    assert len(modules) <= MOST_MODULES
    listed = re.findall(r"^- `(\w+)`: .*\?$", studies.__doc__, re.MULTILINE)
    found = {path.stem for path in (ROOT / "benchmarks" / "studies").glob("*.py")} - {"__init__"}
    assert listed == sorted(found)


@pytest.mark.parametrize(("module", "words"), list(commands()))
def test_a_written_command_has_options_that_its_program_knows(module, words, parser_of):
    given = shlex.split(words.replace("'", "\\'"))
    if module == "benchmarks":  # the suite's program reads the rest
        if not given or given[0].startswith("SUITE"):
            return
        module, given = suites.SUITES[given[0]].program, given[1:]
    if module in ("benchmarks.tables", "benchmarks.worker"):
        assert importlib.util.find_spec(module) and not given
        return
    parser = parser_of(module, given)
    for word in given:
        if word.startswith("--"):
            assert word.partition("=")[0].rstrip(".,)") in parser._option_string_actions, word


@pytest.mark.parametrize("path", sorted(rows.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_are_rows_that_say_what_was_measured_and_by_what(path):
    found = rows.read(path)
    if path.name == "restarts.json":  # one run, whose kills are its rows
        found = [found | {"method": "restart", "jax": None}]
    for row in found:
        assert rows.name_of(row)
        by = row.keys() | row.get("measured", {}).keys()
        assert {"jax", "software", "versions", "error"} & by
