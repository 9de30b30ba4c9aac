"""Processes that cannot join each other say why, all of them, and in time."""

import concurrent.futures
import socket
import threading
import time
import types

import pytest
from addresses import address_outside
from addresses import free_addresses
from strangers import connected
from strangers import strangers

from keras_conflux._cluster import loopback
from keras_conflux._cluster import roll_call


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(roll_call, "_ATTEMPT_SECONDS", 0.2)
    monkeypatch.setattr(roll_call, "_LATE_SECONDS", 0.5)


def told(*processes, seconds=1.0):
    """Returns what each is told; a process is its addresses and its index."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        called = [
            pool.submit(roll_call.call_roll, addresses, index, seconds)
            for addresses, index in processes
        ]
        return [each.result() for each in called]


def test_all_go_on_when_all_have_come():
    addresses = free_addresses(3)
    for _ in range(2):  # the ports are free again
        assert told(*((addresses, i) for i in (2, 0, 1))) == [None] * 3


def test_all_are_told_who_has_not_come():
    addresses = free_addresses(4)
    found = told((addresses, 0), (addresses, 2))
    missing = f"process 1 at {addresses[1]}, process 3 at {addresses[3]}"
    assert found == [f"Nobody has come in 1 s as {missing}."] * 2


def test_the_first_does_not_answer():
    addresses = free_addresses(2)
    (found,) = told((addresses, 1), seconds=0.1)
    assert found == f"Process 0 does not answer at {addresses[0]}, in 0.6 s."


def test_a_host_without_a_name():
    (first,) = free_addresses(1)
    addresses = [first, "no-such-host.invalid:1"]
    (found,) = told((addresses, 0), seconds=0.1)
    assert "come in 0.1 s as process 1 at no-such-host.invalid:1" in found


@pytest.mark.parametrize("index", [0, 1])
def test_a_port_that_is_in_use(index):
    addresses = free_addresses(2)
    port = int(addresses[index].partition(":")[2])
    with socket.create_server(("", port)):
        found = told((addresses, 0), (addresses, 1), seconds=0.5)
    assert "port cannot be used: [Errno 98] Address already" in found[index]
    assert found[index].endswith(", or this rank was started twice.")
    assert addresses[index] in found[1 - index]


@pytest.mark.parametrize("more", ["first", "second"])
def test_another_number_of_processes(more):
    addresses = free_addresses(3)
    of = {"first": addresses[:2], "second": addresses[:2]} | {more: addresses}
    counts = len(of["second"]), len(of["first"])
    expected = "Process 1 was told of {} processes, and process 0 of {}."
    found = told((of["first"], 0), (of["second"], 1))
    assert found == [expected.format(*counts)] * 2


def test_two_that_are_told_to_be_the_same():
    addresses = free_addresses(4)
    elsewhere = [addresses[0], addresses[3], addresses[2]]  # another host
    found = told((addresses[:3], 0), (addresses[:3], 1), (elsewhere, 1))
    assert found == ["Two processes were told that they are process 1."] * 3


@pytest.mark.parametrize("token", ["", "of the training"])
@pytest.mark.parametrize("come", [(1, 2), (1,)])
def test_strangers_change_nothing(come, token, monkeypatch):
    monkeypatch.setenv(roll_call.TOKEN, token)
    monkeypatch.setattr(roll_call, "_UNKNOWN_CALLERS", 40)
    addresses = free_addresses(3)
    port = int(addresses[0].partition(":")[2])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        begun = time.monotonic()
        first = pool.submit(roll_call.call_roll, addresses, 0, 3)
        with strangers(port):
            found = told(*((addresses, index) for index in come), seconds=3)
            found.append(first.result())
        if len(come) == 2:
            assert found == [None] * 3
        else:
            (text,) = {*found}
            assert "Nobody has come in 3 s as process 2 at" in text
            assert "another CONFLUX_TOKEN" in text  # of those who guess
            assert time.monotonic() - begun < 10


def test_another_token_is_named(monkeypatch):
    addresses = free_addresses(2)
    digest = roll_call._digest
    has_other = threading.local()
    monkeypatch.setattr(
        roll_call,
        "_digest",
        lambda text: digest(f"{text}{getattr(has_other, 'token', '')}"),
    )

    def other():
        has_other.token = "another"
        return roll_call.call_roll(addresses, 1, 1)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(roll_call.call_roll, addresses, 0, 1)
        second = pool.submit(other)
        for each in (first.result(), second.result()):
            assert "another CONFLUX_TOKEN" in each


def test_those_who_have_left_do_not_count():
    addresses = free_addresses(3)
    port = int(addresses[0].partition(":")[2])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(roll_call.call_roll, addresses, 0, 5)
        with connected(port) as other:
            other.sendall(roll_call._message("1 3"))
        assert told((addresses, 2), (addresses, 1), seconds=5) == [None] * 2
        assert first.result() is None


def test_who_is_on_another_host_is_no_caller():
    addresses = free_addresses(2)
    port = int(addresses[0].partition(":")[2])
    address = address_outside()
    if address is None:
        pytest.skip("this host has no other interface than the loopback")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(roll_call.call_roll, addresses, 0, 5)
        connected(port).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), 5)
        assert told((addresses, 1), seconds=5) == [None]
        assert first.result() is None


@pytest.mark.parametrize(
    ("addresses", "are_local"),
    [
        (["localhost:1", "127.0.0.1:2", "127.9.9.9:3", "[::1]:4"], True),
        (["localhost:1", "10.0.0.1:2"], False),
        (["localhost.example:1"], False),
        (["0.0.0.0:1"], False),
    ],
)
def test_which_processes_are_on_one_host(addresses, are_local):
    assert loopback.are_local(addresses) == are_local


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [
        ("10.0.0.2", "10.0.0.1", "10.0.0.2"),
        ("::ffff:10.0.0.2", "::ffff:10.0.0.1", "10.0.0.2"),
        ("fd00::2", "fd00::1", "fd00::2"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1", ""),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", ""),
        ("127.0.0.1", "127.0.1.1", ""),
        ("fe80::2%eth0", "fe80::1%eth0", "fe80::2"),
    ],
)
def test_where_a_process_comes_from(there, here, expected):
    caller = types.SimpleNamespace(
        getpeername=lambda: (there, 1), getsockname=lambda: (here, 2)
    )
    assert roll_call._host(caller) == expected
