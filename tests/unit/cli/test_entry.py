"""How a command ends for a person, whatever reads its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.cli.entry import run_command

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("words", [["--help"], ["check", "tiny", "--print-config"]])
def test_a_reader_that_has_gone_costs_no_traceback(words):
    """As with ``| head``: the few lines of one are still in the buffer at its end, the many of the
    other are not.
    """
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlpost", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + 13, "")


def test_a_file_that_cannot_be_used_is_a_message_and_a_fault_of_ours_is_not(tmp_path, capsys):
    missing = tmp_path / "missing"
    assert run_command(lambda words: len(missing.read_text()), []) == 1
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"

    def fault(words):
        raise OSError("a socket")

    with pytest.raises(OSError, match="a socket"):
        run_command(fault, [])
