"""Run a command of Slurm on a batch host: bounded in time, and never an exception. Python 3.6."""

import subprocess
from typing import Mapping, Optional, Sequence

ANSWER_S = 10.0


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = ANSWER_S
) -> Optional[str]:
    """Output of a command; None if it failed, is missing or does not answer in time."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            timeout=timeout_s,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
