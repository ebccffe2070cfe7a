"""Copies lie on another host where there is one, and a step is taken only if all of it is there."""

import os

import pytest

from jaxcomp.launch import holders

CODE = "a" * 64


@pytest.mark.parametrize(
    ("hosts", "near"),
    [
        ("a", [0]),
        ("ab", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aaab", [3, 3, 3, 0]),
        ("abab", [1, 0, 3, 2]),
    ],
)
def test_a_neighbour_is_on_the_next_host(hosts, near):
    assert holders.neighbours(hosts) == near


def held(*each):
    return [{"names": [f"{name}.{CODE}" for name in names.split()]} for names in each]


def test_the_newest_step_that_is_whole_is_taken_and_who_has_it_is_known():
    whole = held("4-all-of-2 4-0-of-2 6-all-of-2 6-0-of-2", "4-all-of-2 4-1-of-2 4-0-of-2")
    found = holders.chosen(whole, 3)
    assert found == (
        4,
        {f"4-all-of-2.{CODE}": [0, 1], f"4-0-of-2.{CODE}": [0, 1], f"4-1-of-2.{CODE}": [1]},
    )
    assert holders.chosen(whole, 5) == "nobody has these parts of step 6: 1"
    assert holders.chosen(whole, 7) == ""


@pytest.mark.parametrize(
    ("told", "missing"),
    [
        (held("4-0-of-2 4-1-of-2"), "all"),
        (held("4-all-of-3 4-0-of-3"), "1, 2"),
        ([{"names": ["4-all-of-1." + CODE, "4-0-of-1.short"]}, {}], "0"),
    ],
)
def test_what_is_missing_is_named(told, missing):
    assert holders.chosen(told, 0) == f"nobody has these parts of step 4: {missing}"


def test_processes_of_a_host_share_its_folders(tmp_path):
    of = lambda hosts, me: holders.folders_for(tmp_path, tmp_path / "run", hosts, me)
    names = lambda paths: [path.name for path in paths]
    assert [names(of("aba", me)) for me in range(3)] == [["0"], ["0"], ["1"]]
    for number in "23":
        (of("a", 0)[0].parent / number).mkdir()
    assert [names(of("aa", me)) for me in range(2)] == [["0", "2"], ["1", "3"]]
    top = tmp_path / f"jaxcomp-{os.getuid()}"
    assert top.stat().st_mode & 0o777 == 0o700
    other = holders.folders_for(tmp_path, tmp_path / "another", "a", 0)
    assert other[0].parent != of("a", 0)[0].parent


def test_a_link_or_a_file_in_place_of_the_folder_is_refused(tmp_path):
    top = tmp_path / f"jaxcomp-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    top.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is not a folder of this user"):
        holders.folders_for(tmp_path, tmp_path / "run", "a", 0)
    assert list((tmp_path / "elsewhere").iterdir()) == []
