"""What is written as a whole, and amounts in words."""

import asyncio
import os
import subprocess
import sys

import pytest

from rlpost.files import in_daemon, write_whole
from rlpost.units import count_text, size_text


def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, ["one\n", "two\n"])
    assert path.read_text() == "one\ntwo\n"

    def broken():
        yield "half"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_whole(path, broken())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            write_whole(path, ["three"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and path.read_text() == "one\ntwo\n"


def test_a_call_that_hangs_does_not_keep_the_process_from_its_end():
    def fail():
        raise OSError("full")

    assert asyncio.run(in_daemon(lambda: 7)) == 7
    with pytest.raises(OSError, match="full"):
        asyncio.run(in_daemon(fail))
    program = (
        "import asyncio, time; from rlpost.files import in_daemon\n"
        "asyncio.run(asyncio.wait_for(in_daemon(lambda: time.sleep(600)), 0.1))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert "TimeoutError" in done.stderr


def test_amounts_are_said_with_a_unit():
    sizes = [size_text(size) for size in (0, 999, 450_600, 2.7e6, 80e9, 2.5e12)]
    assert sizes == ["0 B", "999 B", "450.6 kB", "2.7 MB", "80.0 GB", "2.50 TB"]
    assert [count_text(count) for count in (64, 451_600, 7.6e6, 4_022_468_096)] == ["64", "451.6k", "7.6M", "4.02B"]
