"""Imported by the test program of a ``CommandVerifier`` as ``rlpost_verifier``.

    import rlpost_verifier
    rlpost_verifier.begin()
    done = rlpost_verifier.run(["python3", "/work/solution.py"], input=b"2 3")
    rlpost_verifier.report(1.0 if done.stdout.strip() == b"5" else 0.0)

``begin`` reads the token of this run and hides this process: programs of the agent run as the same
user and must not read its memory or its descriptors. They run as child processes; code that is
imported into this process could read the token.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence

_token = ""
_out = -1


def begin() -> None:
    """Read the token and close this process to others. Call it first."""
    global _token, _out
    PR_SET_DUMPABLE = 4
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    _token = os.read(0, 4096).decode().strip()
    _out = os.dup(1)  # not inherited; standard output becomes standard error
    os.dup2(2, 1)
    sys.stdout.flush()


def run(
    argv: Sequence[str], input: bytes = b"", timeout: float = 10.0, cwd: str = "/work"
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of the agent; a program that runs out of time has exit code 124."""
    try:
        return subprocess.run(
            argv,
            input=input,
            capture_output=True,
            timeout=timeout,
            cwd=cwd,
        )
    except subprocess.TimeoutExpired as expired:
        return subprocess.CompletedProcess(argv, 124, expired.stdout or b"", b"")


def report(score: float) -> None:
    """Report the score; the last one counts."""
    os.write(_out, f"\n{_token} {float(score)}\n".encode())
