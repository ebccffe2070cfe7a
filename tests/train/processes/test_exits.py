"""What an exit status means is said once, and everywhere alike."""

import re

import pytest

from tests.helpers.launching import ROOT
from train.processes.exits import Exit, may_restart, of_returncode


def test_the_page_has_the_table_of_all_statuses():
    text = (ROOT / "docs" / "many_hosts.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(str(int(end)), end.meaning, end.again) for end in Exit]
    assert {end.again for end in Exit} == {"nobody has to", "a person", "a machine"}


@pytest.mark.parametrize(
    ("status", "again"), [(0, False), (1, True), (2, False), (75, True), (130, False), (137, True)]
)
def test_a_machine_restarts_what_no_person_has_to_mend(status, again):
    assert may_restart(status) is again
    assert may_restart(9)  # which nobody has heard of


def test_a_signal_is_seen_as_a_shell_sees_it():
    assert [of_returncode(code) for code in (0, 2, -9, -11)] == [0, 2, Exit.KILLED, Exit.CRASHED]
