"""Determine before submission which container a job would use, with the job's own ``container.sh``.

Input: the backend of the settings and the image. Output: pyxis, enroot or none, and why.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from slurm.errors import SpecError

SCRIPT = Path(__file__).with_name("container.sh")
_STAMP = re.compile(r"(?m)^\S+ \S+ container: ")


def choose(backend: str, image: str, variables: Sequence[str] = ()) -> tuple[str, str]:
    """The backend that this host would choose, and a line with the reason.

    Args:
        backend: auto, pyxis or enroot.
        image: path or name; empty if unknown.
        variables: names that must be set in the environment.

    Raises:
        SpecError: the backend is not available, or a variable is wrong or missing; with the remedy.
    """
    done = subprocess.run(
        ["bash", str(SCRIPT), backend, image, *variables], capture_output=True, text=True
    )
    said = _STAMP.sub("", done.stderr).strip()
    if done.returncode != 0:
        raise SpecError(said)
    return done.stdout.strip(), said
