"""Keeper process: run one command and ensure that its process tree does not outlive the agent.

    python -m bootstrap.agent.keeper --channel FD [--scratch DIR]... -- COMMAND...

Input: a Unix socket to the agent (``FD``), which carries ``end SECONDS``; the command, which
inherits the keeper's standard streams. Output over the socket, one JSON object per line:
``{"event": "started", "pid"}``, ``{"event": "exited", "code"}`` (negative: signal), ``{"event":
"gone"}``.

Why a separate process: on preemption, Slurm's proctrack/linuxproc sends TERM to every process below
the task that it finds by parent pid, but Ray must keep running until a checkpoint is saved. The
keeper detaches (new session, parent init), so that the signal reaches only the agent. Detached
processes can leak; hence the invariants:

- When the socket closes, for any reason, the keeper ends all its descendants (TERM, then KILL),
  removes every ``--scratch`` and only then exits.
- Descendants cannot escape: the keeper is a child subreaper (prctl(2)), so orphans become its
  children, and "no child left" (ECHILD) means that all are gone.
- If the keeper itself is killed, the kernel sends KILL to the command (PR_SET_PDEATHSIG), and the
  agent, on seeing the socket close, kills the rest of the command's session.
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
_ORPHANED_GRACE_S = 5.0  # between TERM and KILL when the agent is gone
_KILL_ROUND_S = 0.2
_LINGER_S = 60.0  # the agent may read the scratch folder for this long after the end

_libc = ctypes.CDLL(None, use_errno=True)


class Keeper:
    """The command's process tree and its states: running, ending, gone."""

    def __init__(self, channel: socket.socket, command: Sequence[str]) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        self._wakeup_end = wakeup_end  # keep a reference: closing it would stop the wake-ups
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(channel, selectors.EVENT_READ)
        self._line = b""
        self._is_agent_connected = True
        self._kill_at: float | None = None  # monotonic seconds; set once ending has begun
        self._pid = _spawn(command)
        self._report(event="started", pid=self._pid)

    def run(self) -> None:
        """Run until no descendant is left."""
        while self._reap():
            self._wait()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_all(signal.SIGKILL)
                # repeat: a fork may have been missed
                self._kill_at = time.monotonic() + _KILL_ROUND_S
        self._report(event="gone")
        leave_at = time.monotonic() + _LINGER_S
        while self._is_agent_connected and time.monotonic() < leave_at:
            self._kill_at = leave_at  # only the deadline of _wait: nothing is left to kill
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
            self._is_agent_connected = False
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
        """Reap exited children; False if no child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._pid:
                    self._report(event="exited", code=os.waitstatus_to_exitcode(status))
                    self._begin_end(_ORPHANED_GRACE_S)  # ends the command's remaining children
        except ChildProcessError:
            return False

    def _signal_all(self, number: signal.Signals) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it exited after it was listed, or changed its user
                process.send_signal(number)

    def _report(self, **event: object) -> None:
        with suppress(OSError):  # the agent is gone; _listen detects the closed socket
            self._channel.sendall(json.dumps(event).encode() + b"\n")


def _spawn(command: Sequence[str]) -> int:
    """Start the command in a new session; its exit code is 127 if it cannot be executed."""
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        os.setsid()
        # Sent when the thread that forked ends, which is the keeper's only one.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored_by_python, signal.SIG_DFL)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]} cannot be executed: {error}\n".encode())
    os._exit(127)


def _detach() -> None:
    """Leave the agent's process tree: the parent exits at once and init adopts the child."""
    if os.fork() != 0:
        os._exit(0)


def main(argv: Sequence[str]) -> None:
    """Entry point; the agent has started this process as a session leader."""
    parser = argparse.ArgumentParser(prog="bootstrap.agent.keeper")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--scratch", action="append", default=[])
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    _detach()
    os.set_inheritable(options.channel, False)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for name in ("TERM", "INT", "HUP", "USR1", "USR2", "CHLD"):
        # a handler, unlike "ignore", is not inherited by the command
        signal.signal(signal.Signals[f"SIG{name}"], lambda *_: None)
    keeper = Keeper(socket.socket(fileno=options.channel), options.command)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)  # the keeper must not hold the command's pipes open
    keeper.run()
    for folder in options.scratch:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
