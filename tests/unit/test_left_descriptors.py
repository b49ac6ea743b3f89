"""The check that the tests of a file close their descriptors finds those left, and no others."""

import os
import socket
import threading

from tests.left_descriptors import left_descriptors, open_descriptors


def test_descriptors_above_the_bound_are_named(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # it takes a while, and there are no cycles here
    before = open_descriptors()
    left, right = socket.socketpair()
    with left, right:
        assert left_descriptors(before, most=2, grace_s=0.0) == []
        found = left_descriptors(before, most=1, grace_s=0.0)
        assert [name.partition(":")[0] for name in found] == ["socket", "socket"]
        with open(os.devnull):
            assert len(left_descriptors(before, most=1, grace_s=0.0)) == 2
    assert left_descriptors(before, most=0, grace_s=0.0) == []


def test_a_descriptor_in_a_cycle_is_closed_and_one_of_an_ending_thread_awaited():
    before = open_descriptors()
    cycle = [socket.socket()]
    cycle.append(cycle)
    late = socket.socket()
    thread = threading.Timer(0.1, late.close)
    thread.start()
    del cycle
    assert left_descriptors(before, most=0) == []
    thread.join()
