"""Slurm's signals to the batch script as flags, and a wait that they interrupt. Python 3.6."""

import os
import select
import signal
from types import FrameType
from typing import Optional

STOPS = ("SIGUSR2", "SIGUSR1", "SIGHUP", "SIGINT", "SIGXCPU")
"""The job's own signal (``--signal=B:USR2``), and those with which sites, plugins and users
announce an end: by default each of them would end this process, and the run without a decision."""


class Signals:
    """Handlers of TERM and of ``STOPS``. One object in a process; made before anything else.

    Attributes:
        stopped: a stop request: preemption, or the time limit is near.
        reason: where it came from; empty without one.
        terminated: TERM came: the job was cancelled, or its grace time is over.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.reason = ""
        self.terminated = False
        # Python writes a byte into the pipe for each signal, which ends the wait below.
        self._awake, awaken = os.pipe()
        for descriptor in (self._awake, awaken):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(awaken)
        for name in STOPS:
            signal.signal(getattr(signal, name), self._stop)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def wait(self, seconds: float) -> None:
        """Return after a time, at a signal, or when a child process ends."""
        poll = select.poll()  # unlike select it takes descriptors above 1023
        poll.register(self._awake, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            os.read(self._awake, 4096)

    def request_stop(self, reason: str) -> None:
        """Request a stop as a signal does; the first reason counts."""
        self.stopped = True
        self.reason = self.reason or reason

    def _stop(self, number: int, frame: Optional[FrameType]) -> None:
        name = signal.Signals(number).name[len("SIG") :]
        what = ": preemption, or the time limit is near" if name == "USR2" else ""
        self.request_stop(f"signal {name} to the batch script{what}")

    def _terminate(self, number: int, frame: Optional[FrameType]) -> None:
        self.terminated = True


def ignore_term() -> None:
    """From now on a TERM has no effect: a requeue sends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
