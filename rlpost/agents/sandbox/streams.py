"""Pipes of a command: bounded output while it streams, and standard input.

Input: descriptors of pipes. Output: the first bytes of a stream, and whether more were dropped.
Past the bound a stream is read slowly, so that an endless writer blocks on its own pipe instead of
occupying the driver.
"""

from __future__ import annotations

import asyncio
import os

CHUNK = 1 << 16
DROP_PAUSE = 0.004  # s between two dropped chunks: at most 16 MB/s


class Capture:
    """The read end of a pipe, drained in the background. ``handle`` is closed by ``finish``."""

    def __init__(self, handle: int, limit: int) -> None:
        self._handle, self._limit = handle, limit
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self.truncated = False
        os.set_blocking(handle, False)
        self._loop.add_reader(handle, self._readable)

    def _readable(self) -> None:
        if not self._read_chunk():
            self._loop.remove_reader(self._handle)
        elif self.truncated:
            self._loop.remove_reader(self._handle)
            self._timer = self._loop.call_later(DROP_PAUSE, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._handle, self._readable)

    def _read_chunk(self) -> bool:
        """Read a chunk from the pipe; return False at its end."""
        try:
            data = os.read(self._handle, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        kept = data[: self._limit - len(self._data)]
        self._data += kept
        self.truncated = self.truncated or len(kept) < len(data)
        return True

    def finish(self) -> bytes:
        """Read the rest of the pipe, close it and return the kept bytes."""
        if self._handle < 0:
            return bytes(self._data)
        self._loop.remove_reader(self._handle)
        if self._timer is not None:
            self._timer.cancel()
        size = len(self._data)
        # A pipe holds at most 1 MiB. The loop is bounded: a background process may still write.
        for _ in range((1 << 20) // CHUNK + 1):
            if self.truncated or not self._read_chunk() or len(self._data) == size:
                break
            size = len(self._data)
        os.close(self._handle)
        self._handle = -1
        return bytes(self._data)


class Feed:
    """The write end of a pipe, filled in the background and closed at the end of the data."""

    def __init__(self, handle: int, data: bytes) -> None:
        self._handle, self._data = handle, memoryview(data)
        self._loop = asyncio.get_running_loop()
        if not data:
            self.finish()
            return
        os.set_blocking(handle, False)
        self._loop.add_writer(handle, self._writable)

    def _writable(self) -> None:
        try:
            written = os.write(self._handle, self._data[:CHUNK])
        except BlockingIOError:
            return
        except OSError:  # the command closed its end
            self.finish()
            return
        self._data = self._data[written:]
        if not self._data:
            self.finish()

    def finish(self) -> None:
        """Close the pipe; data that is not written yet is dropped."""
        if self._handle >= 0:
            self._loop.remove_writer(self._handle)
            os.close(self._handle)
            self._handle = -1
