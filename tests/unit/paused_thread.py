"""A thread that stops after its n-th system call: an older attempt that hangs there while a newer
one runs.
"""

import contextlib
import os
import threading

CALLS = (
    "open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "stat", "listdir", "scandir",
)  # fmt: skip


class PausedThread:
    """Runs one function in a thread and pauses it after system call ``number``, until ``resume`` is
    set.
    """

    def __init__(self, number, monkeypatch, *, calls=CALLS):
        self.left, self.stopped, self.resume, self.thread = (
            number,
            threading.Event(),
            threading.Event(),
            None,
        )
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
        """Start ``act``, which may raise ``expected``; returns whether it paused (else it made
        fewer calls).
        """

        def whole():
            with contextlib.suppress(*expected):
                act()
            self.stopped.set()

        self.thread = threading.Thread(target=whole)
        self.thread.start()
        assert self.stopped.wait(20)
        return self.left <= 0
