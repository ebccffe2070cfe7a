"""Every command of every page is typed by a journey, or is named with the reason why not."""

import pytest

from tests.helpers.snippets import ROOT
from tests.journeys import engine, facts

TEXTS = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in page.parts
}


def test_every_command_is_typed_or_named_and_no_name_is_stale():
    found = {name: {c.text for c in engine.commands(text)} for name, text in TEXTS.items()}
    typed = set().union(*(found[name] for name in facts.PAGES))
    others = set().union(*(found[name] for name in TEXTS.keys() - facts.PAGES.keys()))
    # Of other pages those of the program; tests/benchmarks/test_suites.py reads the benchmarks'.
    others = {text for text in others if "-m train" in text}
    assert len(typed) > 30
    assert others - typed - facts.ELSEWHERE.keys() == set()
    assert facts.ELSEWHERE.keys() - typed - others == set()
    assert all(facts.ELSEWHERE.values())


def test_no_command_asks_for_fewer_steps_than_one_before_it():
    """Read in order, in one checkout: such a run would be refused."""
    done: dict[str, int] = {}
    for page in facts.PAGES:
        for command in engine.commands(TEXTS[page]):
            if asked := engine.asked(facts.written(page, command.text)):
                name, steps = asked
                assert steps >= done.get(name, 0), f"{page}: {command.text}"
                done[name] = steps
    assert len(done) > 10


@pytest.mark.parametrize("name", facts.PAGES)
def test_what_a_journey_knows_of_a_page_is_there(name):
    text, page = TEXTS[name], facts.PAGES[name]
    assert [word for word in page.instead if word not in text] == []
    named = [*page.harm, *page.environ]
    for command in engine.commands(text):
        named = [end for end in named if not facts.is_named(command, end)]
    assert named == []


def test_numbers_may_differ_from_what_a_page_shows_but_words_and_order_may_not():
    said = "a line\n  time 1 min 44 s in 120 steps of 0.864 s\nruns/x: step 120\n"
    shown = "  time 58.2 s in 200 steps of 0.291 s\nruns/x: step 200\n"
    engine.require_shown(shown, said)
    for other in (shown.replace("steps of", "step of"), shown.replace("/x", "/y")):
        with pytest.raises(AssertionError, match="the page shows"):
            engine.require_shown(other, said)
    with pytest.raises(AssertionError, match="the page shows"):
        engine.require_shown("runs/x: step 1\n  time 1 s in 1 steps of 1 s\n", said)


def test_a_page_s_blocks_are_read_as_a_reader_does():
    page = """# A page

    pip install .   # the library
    python -m train configs/a.py --steps 9 \\
        --seed 1

```text
said
```

    --name b

```python
print(1)
```
```text
1
```

    b: said too
"""
    assert engine.commands(page) == [
        engine.Command("pip install .", "the library", ""),
        engine.Command("python -m train configs/a.py --steps 9 --seed 1", "", "said\n"),
        engine.Command(
            "python -m train configs/a.py --steps 9 --seed 1 --name b", "", "b: said too\n"
        ),
    ]
