"""A thread that pauses after its n-th system call, like an older attempt that hangs there while a
newer one runs.
"""

import contextlib
import os
import threading

CALLS = (
    "open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "stat", "listdir", "scandir",
)  # fmt: skip


class PausedThread:
    """Runs a function in a thread and pauses it after ``number`` system calls until ``resume`` is set."""

    def __init__(self, number, monkeypatch, *, calls=CALLS):
        self.left = number
        self.stopped, self.resume = threading.Event(), threading.Event()
        self.thread = None
        for name in calls:
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call):
        def act(*given, **named):
            try:
                return call(*given, **named)
            finally:
                if threading.current_thread() is self.thread:
                    self.left -= 1
                    if self.left == 0:
                        self.stopped.set()
                        self.resume.wait(20)

        return act

    def run(self, act, *, expected):
        """Start ``act``, which may raise ``expected``; return whether it paused.

        It did not if it made fewer calls.
        """

        def whole():
            with contextlib.suppress(*expected):
                act()
            self.stopped.set()

        self.thread = threading.Thread(target=whole)
        self.thread.start()
        assert self.stopped.wait(20)
        return self.left <= 0
