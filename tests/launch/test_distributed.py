"""Processes meet, or all of them are told what is wrong; and they run the same, or none does."""

import concurrent.futures
import contextlib
import signal
import socket
import threading
import time

import pytest

from jaxcomp.launch import addresses, distributed, rendezvous
from jaxcomp.launch.board import Board
from jaxcomp.launch.distributed import Cluster, Timeouts
from jaxcomp.launch.exits import Transient
from tests.helpers.launching import free_port, reach, two_processes

HERE = socket.gethostname()
MET = ("127.0.0.1", "127.0.0.1", b"")


def meet_all(places, seconds=10.0):
    """Calls `meet` with each (coordinator, num_processes, process_id) at the same time."""

    def meet(place):
        try:
            return rendezvous.meet(*place, seconds)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(meet, places))


def test_processes_meet_in_any_order_and_leave_the_port_free():
    coordinator = f"127.0.0.1:{free_port()}"
    places = [(coordinator, 5, process) for process in (3, 1, 4, 0, 2)]
    assert meet_all(places) == [MET] * 5
    assert meet_all(places) == [MET] * 5


def test_ipv6_works_alike():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback address")
    coordinator = f"[::1]:{free_port()}"
    assert meet_all([(coordinator, 2, 0), (coordinator, 2, 1)]) == [("::1", "::1", b"")] * 2


def test_all_are_told_who_is_missing():
    coordinator = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    said = meet_all([(coordinator, 4, process) for process in (0, 2)], seconds=1.0)
    assert 1.0 <= time.monotonic() - began < 5.0
    assert said[0] == said[1]
    assert said[0].startswith(f"Transient: only 2 of 4 processes have met at {coordinator}")
    assert f"there are 0 ({HERE}), 2 ({HERE}); missing: 1, 3" in said[0]


def test_all_are_told_of_two_with_one_number():
    coordinator = f"127.0.0.1:{free_port()}"
    said = meet_all([(coordinator, 3, process) for process in (0, 1, 1)])
    assert len(set(said)) == 1
    what = f"ValueError: two processes have --process-id 1, one on {HERE} and one on {HERE}"
    assert said[0].startswith(what)


def test_all_are_told_of_different_numbers_of_processes():
    coordinator = f"127.0.0.1:{free_port()}"
    said = meet_all([(coordinator, 3, 0), (coordinator, 4, 1)])
    assert said[0] == said[1]
    assert f"process 1 on {HERE} was started with --num-processes 4" in said[0]
    assert f"0 on {HERE} with 3" in said[0]


def test_who_has_gone_while_waiting_can_come_again():
    coordinator = f"127.0.0.1:{free_port()}"
    first = threading.Thread(target=lambda: said.append(rendezvous.meet(coordinator, 3, 0, 10.0)))
    said = []
    first.start()
    with reach(coordinator) as early:
        early.sendall(b'{"process": 1, "of": 3, "on": "x", "nonce": "n"}\n')
    others = meet_all([(coordinator, 3, 1), (coordinator, 3, 2)])
    first.join()
    assert said + others == [MET] * 3


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"process": []}\n',
        b'{"process": 1000000000, "of": 2, "on": "x", "nonce": "n"}\n',
        b'{"process": 0, "of": 2, "on": "x", "nonce": "n"}\n',
        b'{"process": true, "of": 2, "on": "x", "nonce": "n"}\n',
        60_000 * b"[" + b"\n",
        4000 * b"[" + b"\n",
    ],
    ids=lambda words: words[:24].decode(),
)
def test_strangers_at_the_port_disturb_nobody(words):
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(rendezvous.meet, coordinator, 2, 0, 10.0)
        with reach(coordinator) as stranger:
            with contextlib.suppress(OSError):  # who says too much is cut off
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
            assert rendezvous.meet(coordinator, 2, 1, 10.0) == MET
        assert first.result() == MET


def test_another_program_at_the_port_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        coordinator = f"127.0.0.1:{other.getsockname()[1]}"
        (client,) = meet_all([(coordinator, 2, 1)])
        (server,) = meet_all([(coordinator, 2, 0)])
        thread.join()
    assert f"Transient: the program at {coordinator} is not this run's process 0" in client
    assert f"Transient: process 0 cannot listen at {coordinator}" in server
    assert "Address already in use" in server and "the port free" in server


def test_a_coordinator_that_is_not_there_is_named():
    coordinator = f"127.0.0.1:{free_port()}"
    (said,) = meet_all([(coordinator, 2, 1)], seconds=0.5)
    assert (
        f"Transient: process 0 cannot be reached at {coordinator} (127.0.0.1) from {HERE}" in said
    )
    assert "Connection refused" in said


def test_a_name_that_means_loopback_gets_a_hint(monkeypatch):
    monkeypatch.setattr(addresses, "resolve", lambda host: "127.0.0.1")
    coordinator = f"node001:{free_port()}"
    for process in (0, 1):
        (said,) = meet_all([(coordinator, 2, process)], seconds=0.3)
        assert f"The name 'node001' is 127.0.0.1 on {HERE}, which no other host can reach" in said


def test_process_0_listens_on_no_other_hosts_address():
    # TEST-NET-3 is nobody's.
    (said,) = meet_all([("203.0.113.7:29411", 2, 0)])
    assert "Cannot assign requested address" in said
    assert f"must be this host's ({addresses.listing()})" in said


def test_a_name_is_waited_for_only_where_it_may_appear_later(monkeypatch):
    calls = []

    def resolve(host):
        calls.append(host)
        if len(calls) < 3:
            raise ValueError("the name does not resolve")
        return "127.0.0.1"

    monkeypatch.setattr(addresses, "resolve", resolve)
    with pytest.raises(ValueError, match="does not resolve"):
        rendezvous.meet("pod:29411", 2, 0, 10.0)
    calls.clear()
    with pytest.raises(Transient, match="only 1 of 2"):
        rendezvous.meet(f"pod:{free_port()}", 2, 0, 2.0, patient=True)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("coordinator", "message"),
    [
        ("node001", "needs a host and a port; write HOST:29411"),
        (":29411", "needs a host and a port"),
        ("node001:", "needs a host and a port"),
        ("node001:http", "needs a host and a port"),
        ("fe80::1:29411", "needs a host and a port"),
        ("node001:0", r"must be in \[1, 65535\]"),
        ("node001:65536", r"must be in \[1, 65535\]"),
        ("no.such.host.invalid:29411", "'no.such.host.invalid' does not resolve"),
        ("0.0.0.0:29411", r"every address of a host.*lo 127\.0\.0\.1"),
        ("[::]:29411", "every address of a host"),
    ],
)
def test_a_wrong_coordinator_is_refused_at_once(coordinator, message):
    with pytest.raises(ValueError, match=message):
        distributed.connect(Cluster(coordinator, 2, 0, "flags"), timeouts=Timeouts(60, 20))


@pytest.mark.parametrize("process", [-1, 2, 7])
def test_a_process_number_out_of_range_is_refused(process):
    with pytest.raises(ValueError, match=rf"--process-id {process} must be in \[0, 2\)"):
        distributed.connect(Cluster("127.0.0.1:29411", 2, process, "flags"))


def test_an_interface_must_be_there_with_an_address():
    assert addresses.require_interface("lo").startswith("127.")
    with pytest.raises(ValueError, match=r"'eth77' does not exist on .*one of: .*lo 127\.0\.0\.1"):
        distributed.connect(Cluster("127.0.0.1:29411", 2, 0, "flags"), interface="eth77")


def test_an_interface_without_an_address_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ifb77")])
    with pytest.raises(ValueError, match="'ifb77' is down or has no IPv4 address"):
        addresses.require_interface("ifb77")


def test_differences_name_what_and_where():
    same = {"jax": "1", "config steps": "4"}
    assert distributed.differences([same, dict(same), dict(same)]) == ""
    said = distributed.differences([same, same | {"config steps": "6"}, same | {"extra": "x"}])
    assert "config steps: 4 on processes 0, 2, 6 on process 1;" in said
    assert "extra: missing on processes 0, 1, x on process 2." in said
    many = [{str(i): "a" for i in range(9)}, {str(i): "b" for i in range(9)}]
    assert "; and 4 more" in distributed.differences(many)


PROGRAM = """
import os
import signal
import sys
import time
import jax
from tests.helpers.launching import listening
from jaxcomp.launch import distributed
from jaxcomp.launch.distributed import Cluster, Timeouts

process, coordinator, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
beat = 3 if case == "killed" else 300
distributed.connect(Cluster(coordinator, 2, process, "flags"), timeouts=Timeouts(60, beat))
if case == "killed" and process == 1:
    os.kill(os.getpid(), signal.SIGKILL)
distributed.require_same({"first": "equal"})
jax.devices()
print(*sorted(set(map(str, listening("self")))))
try:
    if case != "differs" and process == 1:
        distributed.abandon(2)
    if case == "fails":
        time.sleep(3)
    distributed.require_same({"data": "ab" if process else "cd"})
except (ValueError, ConnectionError) as error:
    print(type(error).__name__, error)
    distributed.abandon(75 if isinstance(error, ConnectionError) else 2)
"""


@pytest.fixture
def start_two():
    """Starts two processes of `PROGRAM`, which end with the test."""
    # A proxy that does not answer: processes of a run must not go through it.
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    with contextlib.ExitStack() as stack:
        # This host's name is no 127.0.0.5, and process 1 comes from 127.0.0.1.
        yield lambda case: stack.enter_context(
            two_processes(PROGRAM, case, host="127.0.0.5", **proxies)
        )


def test_connected_processes_refuse_alike_what_differs(start_two):
    processes = start_two("differs")
    # Much sooner than any time-out.
    said = [process.communicate(timeout=60)[0].partition("\n") for process in processes]
    assert [heard for heard, _, _ in said] == ["127.0.0.5", "127.0.0.1"]
    what = "data: cd on process 0, ab on process 1"
    for _, _, rest in said:
        assert rest.startswith(f"ValueError the processes do not run the same. {what}. Use the")
        assert rest.count("\n") == 1
    assert [process.returncode for process in processes] == [2, 2]


def test_a_failed_process_waits_for_nobody_and_who_asks_it_hears_of_it(start_two):
    processes = start_two("fails")
    assert processes[1].wait(60) == 2
    assert processes[0].poll() is None
    said = processes[0].communicate(timeout=60)[0]
    assert said.endswith("\nConnectionError process 1 failed; see what is said there.\n")
    assert processes[0].wait() == 75


def test_a_process_that_is_killed_at_the_start_is_missed_in_one_line_at_last(start_two):
    processes = start_two("killed")
    said, _ = processes[0].communicate(timeout=120)
    assert processes[1].wait(10) == -signal.SIGKILL
    assert processes[0].returncode == 75
    assert said.endswith("another process of the run is gone; start the same command to go on\n")
    assert " @ 0x" not in said  # no stack of C++


def board_of(notes, texts=None):
    """A board on which somebody has written."""
    return Board(lambda folder, text: None, lambda folder: notes if folder == "failed" else texts)


def test_those_who_follow_a_failure_are_not_blamed():
    notes = board_of({1: "75", 2: "2", 5: "1"}, {})
    with pytest.raises(ConnectionError, match="^processes 2, 5 failed"):
        distributed.answers(notes, "facts", [0], 10.0)


@pytest.mark.parametrize("text", ["", "[1]", 60_000 * "[", '{"a": '])
def test_nobody_waits_for_ever_and_what_is_no_answer_is_none(text):
    with pytest.raises(ConnectionError, match="has not answered for 0 s"):
        distributed.answers(board_of({1: "75"}, {0: text}), "facts", [0], 0.0)
