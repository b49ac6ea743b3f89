"""The check that every unit test ends its threads finds those that matter."""

import threading
from types import SimpleNamespace

import pytest

from rlpost.extensions.tracking.wandb import WandbWriter
from tests.left_threads import left_threads


def run_our_code(may_end: threading.Event) -> None:
    def start() -> None:
        may_end.wait()
        raise RuntimeError("no run")

    WandbWriter._work(SimpleNamespace(_start=start))


@pytest.mark.parametrize(
    ("target", "daemon", "is_named"),
    [
        (threading.Event.wait, False, True),
        (threading.Event.wait, True, False),
        (run_our_code, True, True),
    ],
)
def test_a_thread_that_keeps_the_process_or_runs_our_code_is_named(target, daemon, is_named):
    before, may_end = set(threading.enumerate()), threading.Event()
    thread = threading.Thread(target=target, args=(may_end,), name="late", daemon=daemon)
    thread.start()
    try:
        while target is run_our_code and not left_threads(before, 0.0):
            thread.join(0.01)  # it has not reached our code yet
        names = left_threads(before, grace_s=0.05)
    finally:
        may_end.set()
        thread.join()
    assert ([name.partition(":")[0] for name in names] == ["late"]) == is_named
    assert left_threads(before) == []
