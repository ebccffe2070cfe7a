"""The pages, read with a keyboard: `make journeys`, not `make test`."""

import pytest

from tests.helpers.snippets import ROOT
from tests.journeys import engine, facts


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """One copy for all pages, as for someone who reads them in order."""
    return engine.checkout(tmp_path_factory.mktemp("journeys"))


@pytest.mark.parametrize("name", facts.PAGES)
def test_the_commands_of_a_page_do_what_it_says(name, checkout):
    page = facts.PAGES[name]
    for make in page.inputs:
        make(checkout)
    for command in engine.commands((ROOT / name).read_text()):
        if command.text in facts.ELSEWHERE:
            continue
        find = lambda of, command=command: [
            x for end, x in of.items() if facts.is_named(command, end)
        ]
        text = facts.written(name, command.text)
        (harm,) = find(page.harm) or [None]
        text = " ".join([*find(page.environ), text])
        said = engine.perform(checkout, text, harm, page.quickly)
        engine.require_shown(command.shown, said)
