"""Writes of a run's files: in order, outside the event loop, with retries, and none after another
attempt has claimed the run.
"""

import asyncio
import errno
import logging
import os
import threading
import time

import pytest

from rlpost.durable import run_files
from rlpost.durable.run_files import RunFile, storage_words
from rlpost.errors import Fenced


def raising(number, times, then):
    """Return a function that raises ``times`` times and then calls ``then``."""
    left = [times]

    def act():
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        then()

    return act


async def test_writes_happen_in_order_including_those_that_failed_at_first(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    done = []
    file = RunFile(tmp_path / "f", lost="gone")
    assert await file.do(lambda: done.append(1))
    assert not await file.do(raising(errno.ENOSPC, 1, lambda: done.append(2)))
    assert (
        done == [1]
        and "f: No space left on device; make room there, or raise the quota" in caplog.text
    )
    assert await file.do(lambda: done.append(3))
    file.close()
    assert done == [1, 2, 3] and "pending writes have succeeded" in caplog.text


def test_a_transient_error_is_retried_at_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_files, "RETRY_AFTER_S", (0.01, 0.01))
    done = []
    file = RunFile(tmp_path / "f", lost="gone")
    assert file.finish(raising(errno.ESTALE, 2, lambda: done.append(1)))
    assert done == [1] and not caplog.records
    assert not file.finish(raising(errno.ESTALE, 3, lambda: done.append(2)))
    assert "Stale file handle; repair the storage or the mount" in caplog.text


def test_writes_lost_at_the_end_are_reported(tmp_path, caplog):
    file = RunFile(tmp_path / "f", lost="not recorded anywhere")
    assert not file.finish(raising(errno.EIO, 99, lambda: None))
    file.close()
    assert "1 writes are lost: not recorded anywhere" in caplog.text


async def test_no_write_starts_once_another_attempt_has_claimed_the_run(tmp_path):
    done, is_fenced = [], threading.Event()

    def check():
        if is_fenced.is_set():
            raise Fenced("another attempt")

    file = RunFile(tmp_path / "f", lost="gone", check=check)
    assert await file.do(lambda: done.append(1))
    is_fenced.set()
    file.soon(lambda: done.append(2))
    with pytest.raises(Fenced):
        await file.do(lambda: done.append(3))
    is_fenced.clear()
    with pytest.raises(Fenced):
        file.finish(lambda: done.append(4))
    file.close()
    assert done == [1]


async def test_only_one_call_waits_for_a_write_that_hangs_and_later_writes_stay_in_order(
    tmp_path, caplog
):
    answers, done = threading.Event(), []
    file = RunFile(tmp_path / "f", lost="gone", deadline_s=0.2)
    started = time.monotonic()
    assert not await file.do(lambda: answers.wait(20) and done.append(1))
    for number in (2, 3, 4):
        assert not await file.do(lambda number=number: done.append(number))
    assert time.monotonic() - started < 10 and caplog.text.count("continues in the background") == 1
    answers.set()
    async with asyncio.timeout(20):
        while not await file.do(lambda: None):
            await asyncio.sleep(0.01)
    assert await file.do(lambda: done.append(5))
    assert done == [1, 2, 3, 4, 5]


async def test_a_bug_in_a_write_is_raised_and_stops_no_later_write(tmp_path):
    file, done = RunFile(tmp_path / "f", lost="gone"), []
    with pytest.raises(ZeroDivisionError):
        await file.do(lambda: 1 / 0)
    assert await file.do(lambda: done.append(1))
    assert done == [1]


def test_an_error_of_the_network_is_no_storage_error():
    assert storage_words(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) is None
    assert storage_words(TimeoutError()) is None
    assert storage_words(OSError(errno.EROFS, "Read-only file system", "/runs/a")) == (
        "/runs/a: Read-only file system; mount it for writing again"
    )


def test_writes_beyond_the_limit_are_dropped_with_a_warning(tmp_path, caplog):
    file, done = RunFile(tmp_path / "f", lost="not recorded", max_waiting=2), []
    answers = threading.Event()
    file.soon(lambda: answers.wait(20) and done.append(1))
    file.soon(lambda: done.append(2))
    assert not file.soon(lambda: done.append(3)).result(20)
    assert caplog.text.count("a write is lost, 2 wait already: not recorded") == 1
    answers.set()
    file.close()
    assert done == [1, 2] and len(caplog.records) == 1
