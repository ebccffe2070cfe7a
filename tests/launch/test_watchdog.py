"""Processes agree on a step to stop before, hear of each other's end, and none hangs for ever."""

import random
import signal
import threading
import time

import pytest

from jaxcomp.launch import peers
from jaxcomp.launch.board import Board
from tests.helpers.launching import piped, two_processes, until

EVERY = 0.02  # seconds between signs of life, in these tests


class Gone(RuntimeError):
    """What JAX's client raises when the store is out of reach."""


@pytest.fixture
def texts():
    """What the processes have put into their store."""
    return {}


@pytest.fixture
def store(texts):
    """What makes the board of a thread that stands for a process."""

    def look(folder):
        found = dict(texts).items()
        at = len(folder) + 1
        return {int(key[at:]): text for key, text in found if key.startswith(folder + "/")}

    def board_of(me):
        return Board(lambda folder, text: texts.__setitem__(f"{folder}/{me}", text), look)

    return board_of


def never(status, words):
    """For processes that must not hear of an end."""
    raise AssertionError(words)


def train(count, store, wishes, lead=2):
    """Steps of `count` threads, none more than `lead` ahead; returns where each one stops."""
    done, stopped, moved = [5] * count, [None] * count, threading.Condition()

    def one(me):
        draw = random.Random(me)
        with peers.meet(me, count, store(me), never, EVERY) as others:
            for step in range(5, 100_000):
                if others.stop(step, "SIGTERM" if step >= wishes.get(me, 10**9) else ""):
                    stopped[me] = step
                    break
                with moved:  # as a collective: all have to come this far
                    done[me] = step + 1
                    moved.notify_all()
                    near = lambda step=step: min(done) + lead > step
                    assert moved.wait_for(near, 30), "a deadlock"
                time.sleep(draw.uniform(0, 0.003))
            until(lambda: None not in stopped)

    threads = [threading.Thread(target=one, args=(me,)) for me in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return stopped


@pytest.mark.parametrize("wishes", [{0: 60}, {2: 60}, {0: 50, 1: 51, 2: 49}, {1: 5}])
@pytest.mark.parametrize("lead", [1, 2])
def test_all_processes_stop_before_one_step_soon_after_the_first_wish(store, wishes, lead):
    stopped = train(3, store, wishes, lead)
    assert len(set(stopped)) == 1
    # A step takes 1.5 ms or more; the wish goes around within three signs of life, and a margin.
    assert min(wishes.values()) <= stopped[0] <= min(wishes.values()) + 300


def test_no_step_begins_once_the_answer_is_given_until_all_have_answered(store, texts):
    answers = []

    def put(folder, text):
        if folder == "begun" and not answers:
            answers.append(threading.Thread(target=lambda: answers.append(others.stop(6, ""))))
            answers[0].start()
            answers[0].join(0.2)
            assert answers[0].is_alive() and text == "6 SIGHUP"
        texts[f"{folder}/0"] = text

    with peers.meet(0, 2, Board(put, store(0).look), never, EVERY) as others:
        assert others.stop(5, "SIGHUP") == ""
        until(lambda: texts.get("begun/0") == "6 SIGHUP")
        texts["begun/1"] = "8"
        answers[0].join(10)
        assert answers[1:] == [""]
        assert [others.stop(step, "") for step in (7, 8)] == ["", "SIGHUP"]


@pytest.mark.parametrize(
    ("theirs", "why"), [("", "SIGTERM"), (" SIGINT", "SIGINT"), (" SIGHUP", "SIGTERM")]
)
def test_all_know_why_they_stop_and_a_person_counts_first(store, texts, theirs, why):
    with peers.meet(0, 2, store(0), never, EVERY) as others:
        assert not others.stop(5, "SIGTERM")
        texts["begun/1"] = f"6{theirs}"
        until(lambda: "begun/0" in texts)
        assert others.stop(6, "") == why


def test_a_single_process_stops_when_it_wants():
    with peers.meet(0, 1, None, never) as others:
        assert not others.stop(3, "")
        assert others.stop(4, "SIGINT") == "SIGINT"
        assert others.lost() == ("", "")


def test_an_end_is_heard_once_by_the_others_with_its_status(store):
    heard = []
    with (
        peers.meet(0, 2, store(0), never, EVERY) as first,
        peers.meet(1, 2, store(1), lambda *words: heard.append(words), EVERY),
    ):
        time.sleep(5 * EVERY)
        assert not heard
        first.end(2, "no space: it needs 3 bytes")
        until(lambda: heard)
        time.sleep(5 * EVERY)
    assert heard == [(2, "process 0 of 2 has ended: no space: it needs 3 bytes")]


@pytest.mark.parametrize("said", ["0 all is well", "-9 x", "x", "", "1000000 x"])
def test_nobody_ends_a_run_as_if_all_was_well(store, texts, said):
    heard = []
    texts["end/1"] = said
    with peers.meet(0, 2, store(0), lambda status, words: heard.append(status), EVERY):
        until(lambda: heard)
    assert heard == [75]


@pytest.mark.parametrize("said", ["x", "", "-1", "9" * 5000, "1e3"])
def test_words_that_no_process_says_stop_no_thread(store, texts, said):
    texts.update({"begun/1": said, "stop/1": "", "life/1": said})
    with peers.meet(0, 2, store(0), never, EVERY) as others:
        until(lambda: "begun/0" in texts)
        assert others.lost() == (
            "process 1 of 2 is gone or stopped: its last sign of life came at its very beginning",
            "",
        )
        texts["begun/1"] = "3"
        assert others.stop(3, "") == "NOBODY"


def test_who_gives_no_sign_of_life_is_named_with_its_last_place(store, texts):
    texts.update({"life/1": "7 12 an evaluation", "life/3": "9 13 a step"})
    with (
        peers.meet(0, 4, store(0), never, EVERY) as others,
        peers.meet(2, 4, store(2), never, EVERY),
    ):
        others.at(30, "a step")
        until(lambda: "life/2" in texts)
        gone, behind = others.lost()
    assert behind == ""
    assert gone == (
        "process 1 of 4 is gone or stopped: its last sign of life came at step 12 (an evaluation)"
        "; process 3 of 4 is gone or stopped: its last sign of life came at step 13 (a step)"
    )


def test_who_lives_or_has_not_come_yet_but_is_behind_is_named(store):
    with peers.meet(0, 2, store(0), never, EVERY) as first:
        assert first.lost() == ("", "process 1 of 2 is behind, at its very beginning")
        with peers.meet(1, 2, store(1), never, EVERY) as second:
            first.at(8, "a step")
            second.at(7, "a save")
            until(lambda: first.lost() == ("", "process 1 of 2 is behind, at step 7 (a save)"))
            second.at(8, "a step")
            until(lambda: first.lost() == ("", ""))


@pytest.mark.parametrize("how", ["raises", "blocks"])
def test_a_store_out_of_reach_means_that_process_0_is_gone(how):
    release = threading.Event()

    def look(folder):
        if how == "blocks":
            release.wait(30)
        raise Gone

    def put(key, text):
        raise Gone

    with peers.meet(1, 2, Board(put, look), never, EVERY) as others:
        began = time.monotonic()
        gone, _ = others.lost()
        assert time.monotonic() - began < 5
        others.end(2, "too")
        release.set()
    assert gone == "process 0 of 2 is gone: it coordinates the others and does not answer"


def test_what_was_seen_counts_when_the_store_is_closed(store, texts):
    closed = False

    def look(folder):
        if closed:
            raise Gone
        return store(0).look(folder)

    with peers.meet(0, 2, Board(store(0).put, look), never, EVERY) as others:
        texts["life/1"] = "3 9 a step"
        time.sleep(20 * EVERY)
        closed = True
        gone, _ = others.lost()
    expected = "process 1 of 2 is gone or stopped: its last sign of life came at step 9 (a step)"
    assert gone == expected


# The watchdog of a single process.

PROGRAM = """
import sys, time
from jaxcomp.launch import watchdog

def latest():
    if sys.argv[1] == "lost":
        raise OSError(116, "Stale file handle")
    return 40

with watchdog.watch(2.0, latest) as watch:
    watch.at(41, "a step")
    print("here", flush=True)
    if sys.argv[1] != "works":
        time.sleep(100)
    for step in range(30):
        watch.at(41 + step, "a step")
        time.sleep(0.1)
    watch.at(71, "an evaluation", 60.0)
    time.sleep(3)
"""


def test_a_hang_ends_with_stacks_and_what_to_do_and_a_pause_is_no_hang():
    hangs, works, lost = (piped(PROGRAM, what) for what in ("hangs", "works", "lost"))
    with hangs, works, lost:
        try:
            for process in (hangs, works, lost):
                assert process.stdout.readline() == "here\n"
            works.send_signal(signal.SIGSTOP)
            _, errors = hangs.communicate(timeout=60)
            time.sleep(3)  # more than the watchdog's patience, for the other one
            works.send_signal(signal.SIGCONT)
            assert works.communicate(timeout=60) == ("", "") and works.returncode == 0
            _, of_files = lost.communicate(timeout=60)
        finally:
            for process in (hangs, works, lost):
                process.kill()
    assert hangs.returncode == 75
    assert 'File "<string>", line 14 in <module>' in errors
    assert errors.splitlines()[-1] == (
        "error: no progress for 2 s after step 41 (a step). The last checkpoint is step 40; start "
        "the same command to go on"
    )
    assert lost.returncode == 75
    assert of_files.splitlines()[-1].endswith(
        "The checkpoints cannot be listed (Stale file handle); start the same command to go on"
    )


# The watchdogs of two processes, of which the second ends.

ONE_ENDS = """
import os, sys, time, types
from jaxcomp.launch import distributed, watchdog
from jaxcomp.launch.distributed import Cluster
from jaxcomp.launch.exits import ended

process, coordinator = int(sys.argv[1]), sys.argv[2]


def run():
    with watchdog.watch(60.0, lambda: 40):
        if process == 0:
            time.sleep(100)
        raise OSError("disk full")
"""

SLOW_END = """
def slow_run():
    try:
        run()
    finally:
        time.sleep(5)  # process 0 hears of the end and takes JAX's store along


distributed.connect(Cluster(coordinator, 2, process, "flags"))
distributed.abandon(ended(slow_run))
"""

LATE_LOGS = """
def logged(function):
    def call(*args):
        os.write(2, b"    @ 0x7f5d a line of a stack trace of JAX\\n")
        return function(*args)

    return call


# What each process does after it has said why it ends.
watchdog.time = types.SimpleNamespace(sleep=logged(time.sleep))
distributed.bounded = logged(distributed.bounded)
distributed.connect(Cluster(coordinator, 2, process, "flags"))
distributed.abandon(ended(run))
"""


def require_reasons(end):
    with two_processes(ONE_ENDS + end) as processes:
        first, second = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], second
    assert first.splitlines()[-1] == "error: process 1 of 2 has ended: disk full"
    assert second.splitlines()[-1] == "error: disk full"


def test_who_ends_slowly_still_says_why_when_the_store_has_gone():
    require_reasons(SLOW_END)


def test_what_jax_logs_after_the_reason_does_not_hide_it():
    require_reasons(LATE_LOGS)
