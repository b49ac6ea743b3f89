"""Threads and sockets of a process group that was left, or that no engine joined."""

import socket
import threading
from datetime import timedelta

import pytest

from rlpost.errors import SyncError
from rlpost.trainer.weights import engine_group
from rlpost.trainer.weights.engine_group import EngineGroup
from tests.ports import free_port


def test_only_the_aborting_thread_drops_a_group_that_is_left(monkeypatch):
    """gloo's destructor waits for the broadcast under way: in the trainer's thread it would wait
    for a dead engine.

    The aborting thread ends before ``leave`` goes on here, which is the order that once stopped a
    trainer.
    """
    dropped_in = []

    class Group:
        def __del__(self):
            dropped_in.append(threading.current_thread().name)

    start = threading.Thread.start

    def start_and_join(thread):
        start(thread)
        thread.join()

    monkeypatch.setattr(engine_group, "_abort_process_group", lambda group: None)
    monkeypatch.setattr(threading.Thread, "start", start_and_join)
    group = EngineGroup(Group(), timeout=timedelta(seconds=1))
    group.leave()
    assert dropped_in == ["abort group"]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_nothing_waits_or_listens_for_engines_of_others_after_a_refusal(is_cancelled):
    """torch's own wait for clients goes on until its deadline, at a full core once its listener has
    been shut down.
    """
    port, cancelled = free_port(), threading.Event()
    if is_cancelled:
        threading.Timer(0.5, cancelled.set).start()
    expected = "cancelled" if is_cancelled else "not all of 3 ranks joined within 0:00:01"
    with pytest.raises(SyncError, match=expected):
        EngineGroup.form(
            ("127.0.0.1", port),
            name="update",
            num_engine_ranks=2,
            backend="gloo",
            timeout=timedelta(seconds=60),
            join=timedelta(seconds=600 if is_cancelled else 1),
            secret=None,
            cancelled=cancelled,
        )
    for thread in threading.enumerate():
        if thread.name == "form engine group":
            thread.join(10)
            assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
