"""Slurm's signals to the batch script as flags, and a wait that they interrupt. Python 3.6."""

import os
import select
import signal
from types import FrameType
from typing import Optional


class Signals:
    """Handlers of USR2 and TERM. One object in a process; made before anything else.

    Attributes:
        stopped: USR2 came: preemption, or the time limit is near.
        terminated: TERM came: the job was cancelled, or its grace time is over.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.terminated = False
        # Python writes a byte into the pipe for each signal, which ends the wait below.
        self._awake, awaken = os.pipe()
        for descriptor in (self._awake, awaken):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(awaken)
        signal.signal(signal.SIGUSR2, self._stop)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def wait(self, seconds: float) -> None:
        """Return after a time, at a signal, or when a child process ends."""
        poll = select.poll()  # unlike select it takes descriptors above 1023
        poll.register(self._awake, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            os.read(self._awake, 4096)

    def _stop(self, number: int, frame: Optional[FrameType]) -> None:
        self.stopped = True

    def _terminate(self, number: int, frame: Optional[FrameType]) -> None:
        self.terminated = True


def ignore_term() -> None:
    """From now on a TERM has no effect: a requeue sends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
