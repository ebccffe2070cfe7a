"""Who reaches a run's network without its secret changes nothing, and holds nothing up for long."""

import concurrent.futures
import socket
import threading
import time

import pytest
from jax._src.lib import _jax

from jaxcomp.launch import arrivals, board, peers, rendezvous, seals
from jaxcomp.launch.board import Board
from jaxcomp.launch.exits import Transient, printable
from tests.helpers.launching import free_port, reach, until

SECRET, OTHER = b"of this run's processes", b"of somebody else"
KEY = seals.session(SECRET, "a start")


@pytest.fixture(scope="module")
def client():
    """A client of JAX's coordination service, as anybody on the network may be one."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, 1)
    made = _jax.get_distributed_runtime_client(address, 0, init_timeout=10)
    made.connect()
    yield made
    made.shutdown()
    service.shutdown()


@pytest.fixture
def forge(client):
    """Writes to JAX's store what no process of the run has written."""
    written = []

    def write(name, text):
        written.append(f"jaxcomp/{name}")
        client.key_value_set(written[-1], text, allow_overwrite=True)

    yield write
    for name in written:
        client.key_value_delete(name)


def test_a_board_has_what_processes_of_this_start_have_written_there(client):
    boards = [board.for_client(client, me, 3, KEY) for me in range(3)]
    boards[0].put("run/life", "1 0 start")
    boards[2].put("run/life", "\N{SNOWMAN} of two")
    boards[2].put("run/lives", "x")
    assert boards[1].look("run/life") == {0: "1 0 start", 2: "\N{SNOWMAN} of two"}
    restarted = board.for_client(client, 1, 3, seals.session(SECRET, "another start"))
    assert restarted.look("run/life") == {}


@pytest.mark.parametrize("key", [KEY, b""])
@pytest.mark.parametrize(
    "name", ["end/7", "end/1000000000", "end/x", "end/01", "end/life/1", "end/-1"]
)
def test_a_number_that_no_process_has_is_not_heard(client, forge, key, name):
    forge(name, "0 all is well")
    assert board.for_client(client, 0, 2, key).look("end") == {}


def test_without_the_secret_nobody_ends_a_run_or_makes_it_stop(client, forge):
    mine = board.for_client(client, 0, 2, KEY)
    theirs = board.for_client(client, 1, 2, seals.session(OTHER, "a start"))
    forge("end/1", "0 all is well")
    forge("stop/1", "")
    forge("begun/1", "7")
    heard = []
    with peers.meet(0, 2, mine, lambda *words: heard.append(words), 0.02) as others:
        theirs.put("end", "2 a mistake")
        time.sleep(0.3)
        assert not heard and not others.stop(9, "")
        board.for_client(client, 1, 2, KEY).put("end", "2 a mistake")
        until(lambda: heard, 10)
    assert heard == [(2, "process 1 of 2 has ended: a mistake")]


def test_what_was_sealed_for_one_place_is_no_good_in_another(client, forge):
    mine = board.for_client(client, 0, 2, KEY)
    mine.put("begun", "7")
    (sealed,) = [text for _, text in client.key_value_dir_get("jaxcomp/begun")]
    forge("begun/1", sealed)
    forge("end/0", sealed)
    assert mine.look("begun") == {0: "7"} and mine.look("end") == {}


def test_a_text_that_is_too_long_is_none(client, forge):
    forge("facts/0", "x" * (board._LONGEST + 1))
    assert board.for_client(client, 1, 2, b"").look("facts") == {}


# At the start.


def meet(coordinator, process, secret, seconds=10.0, count=2):
    try:
        return rendezvous.meet(coordinator, count, process, seconds, False, secret)
    except (ValueError, Transient) as error:
        return error


def test_processes_with_one_secret_have_one_key_which_is_new_in_each_start():
    coordinator = f"127.0.0.1:{free_port()}"
    keys = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            met = pool.map(lambda process: meet(coordinator, process, SECRET, count=3), range(3))
            keys.append({key for _, _, key in met})
    assert [len(each) for each in keys] == [1, 1] and not keys[0] & keys[1]


@pytest.mark.parametrize("secrets", [(SECRET, OTHER), (SECRET, b""), (b"", SECRET)])
def test_processes_with_other_secrets_do_not_meet(secrets):
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, coordinator, 0, secrets[0], 1.5)
        second = pool.submit(meet, coordinator, 1, secrets[1], 1.5)
    assert isinstance(first.result(), Transient) and isinstance(second.result(), Transient)
    assert "without its secret: 127.0.0.1." in str(first.result())
    assert "is not this run's process 0, or has another secret" in str(second.result())


def test_a_false_process_0_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer():
            connection, _ = false.accept()
            with connection:
                connection.sendall(b'{"nonce": "n"}\n')
                connection.recv(4096)
                connection.sendall(b'{"problem": null, "transient": false}\n')

        threading.Thread(target=answer).start()
        met = meet(f"127.0.0.1:{false.getsockname()[1]}", 1, SECRET)
    assert isinstance(met, Transient) and "has another secret" in str(met)


def test_who_says_a_byte_now_and_then_holds_no_start_up(monkeypatch):
    monkeypatch.setattr(arrivals, "_PATIENCE", 0.5)
    coordinator, over = f"127.0.0.1:{free_port()}", threading.Event()

    def dawdle():
        with reach(coordinator) as connection:
            try:
                while not over.wait(0.1):
                    connection.sendall(b"{")
            except OSError:
                return time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        began = time.monotonic()
        slow = [pool.submit(dawdle) for _ in range(8)]
        met = meet(coordinator, 0, b"", 1.5)
        took = time.monotonic() - began
        over.set()
        assert all(each.result() is not None for each in slow)
    assert isinstance(met, Transient) and 1.5 <= took < 2.5


def test_a_crowd_of_strangers_keeps_no_process_out(monkeypatch):
    monkeypatch.setattr(arrivals, "_MOST", 4)
    coordinator = f"127.0.0.1:{free_port()}"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, coordinator, 0, SECRET)
        crowd = [reach(coordinator) for _ in range(40)]
        assert meet(coordinator, 1, SECRET) == first.result()
    for stranger in crowd:
        stranger.close()


def test_nothing_that_is_printed_commands_a_terminal():
    text = "a\x1b[2J\x07\u202e\x9b\udc80 b\n\tc \N{SNOWMAN}"
    assert printable(text) == r"a\x1b[2J\x07\u202e\x9b\udc80 b" + "\n\tc \N{SNOWMAN}"


def test_a_board_needs_no_connection():
    assert board.this_run() is None
    assert isinstance(board.for_client(None, 0, 1, b""), Board)
