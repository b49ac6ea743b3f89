"""A keeper runs one command and sees to it that nothing of it outlives the agent.

    python -m bootstrap.agent.keeper --channel FD [--scratch DIR] -- COMMAND...

Comes in: a Unix socket to the agent (``FD``) and the command, whose standard streams are the keeper's own. Goes out
over the socket, one JSON object a line: ``{"event": "started", "pid"}``, ``{"event": "exited", "code"}`` (negative:
signal), ``{"event": "gone"}``. Comes in over it: ``end SECONDS``.

Why a process of its own: Slurm's proctrack/linuxproc sends the TERM of a preemption to every process below the task
that it finds by parent ids, and Ray must live on until a checkpoint is taken. The keeper has detached itself (session
of its own, parent init), so that signal stops at the agent. What detaches can be forgotten; hence the invariants:

- when the socket closes, for whatever reason, everything below the keeper is ended (TERM, then KILL) and ``--scratch``
  removed, and only then does the keeper end;
- nothing below it can leave: the keeper is a child subreaper (prctl(2)), so orphans become its children, and "no child
  left" (ECHILD) means that all are gone;
- when the keeper itself is killed the command gets KILL from the kernel (PR_SET_PDEATHSIG), and the agent, who sees
  the socket close, kills what is left of the command's session.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANED_GRACE_S = 5.0  # between TERM and KILL when nobody is left to say how long
_KILL_ROUND_S = 0.2
_LINGER_S = 60.0  # how long an agent may look at the scratch folder after the end

_libc = ctypes.CDLL(None, use_errno=True)


class Keeper:
    """The command's process tree and its way from running over ending to gone."""

    def __init__(self, channel: socket.socket, command: Sequence[str]) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        self._wakeup_end = wakeup_end  # kept: closing it would stop the wake-ups
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(channel, selectors.EVENT_READ)
        self._line = b""
        self._agent_is_there = True
        self._kill_at: float | None = None  # monotonic seconds; set once ending has begun
        self._pid = _spawn(command)
        self._report(event="started", pid=self._pid)

    def run(self) -> None:
        """Until nothing is left below."""
        while self._reap():
            self._wait()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_all(signal.SIGKILL)
                self._kill_at = time.monotonic() + _KILL_ROUND_S  # again: a fork may have slipped through
        self._report(event="gone")
        leave_at = time.monotonic() + _LINGER_S
        while self._agent_is_there and time.monotonic() < leave_at:
            self._kill_at = leave_at
            self._wait()

    def _wait(self) -> None:
        timeout = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wakeup:
                self._wakeup.recv(4096)
            else:
                self._listen()

    def _listen(self) -> None:
        try:
            data = self._channel.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._agent_is_there = False
            self._selector.unregister(self._channel)
            self._begin_end(_ORPHANED_GRACE_S)
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._begin_end(float(line.removeprefix(b"end ")))

    def _begin_end(self, grace_s: float) -> None:
        kill_at = time.monotonic() + grace_s
        if self._kill_at is None:
            self._kill_at = kill_at
            self._signal_all(signal.SIGTERM)
        self._kill_at = min(self._kill_at, kill_at)

    def _reap(self) -> bool:
        """Collect who has ended; False when no child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._pid:
                    self._report(event="exited", code=os.waitstatus_to_exitcode(status))
                    self._begin_end(_ORPHANED_GRACE_S)  # whatever the command left behind
        except ChildProcessError:
            return False

    def _signal_all(self, number: signal.Signals) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # ended in between, which is what was wanted, or has become somebody else's
                process.send_signal(number)

    def _report(self, **event: object) -> None:
        with suppress(OSError):  # the agent is gone; the closed socket is noticed where it is read
            self._channel.sendall(json.dumps(event).encode() + b"\n")


def _spawn(command: Sequence[str]) -> int:
    """Start the command in a session of its own; 127 is its exit code when it cannot be executed."""
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]} cannot be executed: {error}\n".encode())
    os._exit(127)


def _detach() -> None:
    """Leave the agent's process tree: the first process ends at once and init adopts the second."""
    if os.fork() != 0:
        os._exit(0)


def main(argv: Sequence[str]) -> None:
    """Entry of the process; the agent has made it the leader of a session of its own."""
    parser = argparse.ArgumentParser(prog="bootstrap.agent.keeper")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--scratch")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    _detach()
    os.set_inheritable(options.channel, False)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # a handler, unlike "ignore", is not inherited by the command
    keeper = Keeper(socket.socket(fileno=options.channel), options.command)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # the streams are the command's: a pipe must not stay open because of the keeper
        os.dup2(nowhere, descriptor)
    keeper.run()
    if options.scratch:
        shutil.rmtree(options.scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
