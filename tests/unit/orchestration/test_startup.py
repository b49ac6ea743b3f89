"""A call at low priority does not change the priority of the process."""

import os
import threading

import pytest

from rlpost.orchestration.startup import NICENESS, at_low_priority


def test_only_the_thread_of_the_call_has_low_priority():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    inside = at_low_priority(
        lambda: (os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.getpid())
    )
    assert inside == (max(before, NICENESS), os.getpid())
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_an_error_of_the_call_is_raised():
    with pytest.raises(KeyError):
        at_low_priority(lambda: {}["missing"])
