"""Score the result of an agent outside its sandbox.

``verify`` ends all processes of the agent, copies a folder, closes the sandbox, and lets a verifier
score the copy in a fresh sandbox that the agent never touched. Files that the agent wrote
elsewhere, its processes and its patches of test files do not exist there.

Two verifiers:

    CaseVerifier      runs the agent's program on inputs; the driver compares the outputs. Nothing
                      inside the sandbox knows the expected outputs or decides the score.
    CommandVerifier   runs a test program of the environment, which reports its score with a secret
                      token; an exit code, a report file or an early exit scores nothing.
"""

from __future__ import annotations

import fnmatch
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.extensions.agents.sandbox.protocol import (
    WORK,
    Pool,
    Sandbox,
    SandboxFileError,
    Snapshot,
    SnapshotEntry,
    SnapshotRefused,
    Verdict,
    Verifier,
    retry,
)

TESTS = "/verifier"
HELPER = Path(__file__).parent / "inner" / "verifier_program.py"
# Python or pytest would execute these instead of the verifier's own files, or before them.
DROPPED = (
    *("__pycache__", "*.pyc", "*.pth", "sitecustomize.py", "usercustomize.py"),
    *("conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
)


async def verify(
    sandbox: Sandbox,
    verifier: Verifier,
    pool: Pool,
    *,
    folder: str = WORK,
    attempts: int = 3,
) -> Verdict:
    """Score ``folder`` of a sandbox, which is closed. Raises ``SandboxLost``.

    The agent's sandbox is closed before another one is acquired, so a full pool cannot deadlock.
    """
    try:
        snapshot = await sandbox.snapshot(folder)
    except SnapshotRefused as error:
        return Verdict(0.0, str(error))
    finally:
        await sandbox.close()

    async def work(fresh: Sandbox) -> float:
        return await verifier.score(fresh, snapshot)

    try:
        score = await retry(pool, work, attempts=attempts)
    except (SnapshotRefused, SandboxFileError) as error:
        return Verdict(0.0, str(error), snapshot.refused)
    return Verdict(score, "", snapshot.refused)


@dataclass(frozen=True)
class CaseVerifier:
    """Run the agent's program once for each case and compare its standard output here."""

    command: str | Sequence[str]
    cases: Sequence[tuple[bytes, bytes]]
    """Standard input and expected output; white space at the end is ignored."""
    timeout: float = 10.0
    """Seconds of one case."""
    all_or_nothing: bool = False
    """Score 0 unless every case is right. Default: the share of the right cases."""

    async def score(self, sandbox: Sandbox, snapshot: Snapshot) -> float:
        """Return the score, from 0 to 1."""
        await sandbox.restore(snapshot)
        right = 0
        for given, expected in self.cases:
            result = await sandbox.run(self.command, stdin=given, timeout=self.timeout)
            complete = result.ok and not result.stdout_truncated
            right += complete and result.stdout.rstrip() == expected.rstrip()
            await sandbox.end_processes()  # a case leaves nothing behind for the next
        if self.all_or_nothing:
            return float(right == len(self.cases))
        return right / max(1, len(self.cases))


@dataclass(frozen=True)
class CommandVerifier:
    """Run a test program on the copy; it reports its score with ``rlpost_verifier``.

    ``files`` are written to /verifier after the copy, next to the module ``rlpost_verifier``
    (``inner/verifier_program.py``), and replace whatever is there. The program calls ``begin()``
    before it touches a file of the agent, runs the agent's programs as child processes, and calls
    ``report(score)``.
    """

    command: str | Sequence[str]
    files: Mapping[str, bytes] = field(default_factory=dict)
    keep: Sequence[str] = ("*",)
    """Patterns of paths that are taken from the agent; ``*`` matches ``/`` as well."""
    drop: Sequence[str] = DROPPED
    """Patterns of names that are not taken, at any depth."""
    timeout: float = 60.0

    async def score(self, sandbox: Sandbox, snapshot: Snapshot) -> float:
        """Return the reported score; 0 without a report, or with one that is not finite."""
        await sandbox.restore(Snapshot(selected(snapshot.entries, self.keep, self.drop)))
        files = {"rlpost_verifier.py": HELPER.read_bytes(), **self.files}
        await sandbox.restore(
            Snapshot(tuple(SnapshotEntry(name, "file", data) for name, data in files.items())),
            TESTS,
        )
        token = secrets.token_hex(16)
        result = await sandbox.run(
            self.command, stdin=token.encode() + b"\n", timeout=self.timeout, cwd=TESTS
        )
        return reported(result.stdout, token)


def selected(
    entries: Sequence[SnapshotEntry], keep: Sequence[str], drop: Sequence[str]
) -> tuple[SnapshotEntry, ...]:
    """Return the entries whose path matches ``keep`` and of which no part matches ``drop``."""
    chosen = []
    for entry in entries:
        parts = entry.path.split("/")
        dropped = any(fnmatch.fnmatchcase(part, name) for part in parts for name in drop)
        if not dropped and any(fnmatch.fnmatchcase(entry.path, name) for name in keep):
            chosen.append(entry)
    return tuple(chosen)


def reported(output: bytes, token: str) -> float:
    """Return the score in the last line that holds the token, 0 when there is none."""
    lines = [line.split() for line in output.decode("utf-8", "replace").splitlines()]
    scores = [words[1] for words in lines if len(words) == 2 and words[0] == token]
    try:
        score = float(scores[-1]) if scores else 0.0
    except ValueError:
        return 0.0
    return score if math.isfinite(score) else 0.0
