"""``tools/install.sh``: what it says before it installs anything."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_named_before_anything_is_made(tmp_path):
    """As a login node has it; pip would say that there is no such torch."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\n[ "$1" = -V ]\n')
    old.chmod(0o755)
    command = [ROOT / "tools/install.sh", tmp_path / "venv"]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{old} is Python 3.9.18, needed is 3.11 or newer: PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()
