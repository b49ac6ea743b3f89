"""Detect nodes whose task failed before their agent joined, long before the deadline.

Input: ``launch.log`` of the attempt, which srun writes on the batch host, and the ends of the
agents' logs. Output: hosts, each with the reason. srun lists only failed tasks; a task that exits
with 0 is found at the deadline.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from common.attempt import LAUNCH_LOG
from common.error_lines import deciding_line
from common.files import tail
from common.host_lists import failed_tasks

POLL_S = 0.5
# Failures with one cause arrive together, and other nodes' logs are visible here a moment later.
SETTLE_S = 1.0
_NUM_LINES = 8
_MAX_BYTES = 1 << 20


def read_failed_tasks(attempt_dir: Path, hosts: Sequence[str]) -> dict[str, str]:
    """``failed_tasks`` of an attempt so far; empty without output of srun."""
    try:
        with (attempt_dir / LAUNCH_LOG).open("rb") as file:
            return failed_tasks(file.read(_MAX_BYTES).decode(errors="replace"), hosts)
    except OSError:
        return {}


def describe(host: str, how: str, attempt_dir: Path) -> str:
    """srun's message about one host, with the last lines of its log and their likely cause."""
    log = with_likely_cause(tail(attempt_dir / f"agent-{host}.log", _NUM_LINES))
    return f"{host} failed before it joined: {how}: {log}"


async def failures_before_joining(
    attempt_dir: Path, hosts: Sequence[str], missing: Callable[[], Collection[str]]
) -> AsyncIterator[dict[str, str]]:
    """Yield newly failed hosts among the missing ones, with reasons, until no host is missing."""
    known: set[str] = set()
    while missing():
        failed = await asyncio.to_thread(read_failed_tasks, attempt_dir, hosts)
        if failed.keys() & set(missing()) - known:
            await asyncio.sleep(SETTLE_S)
            failed = await asyncio.to_thread(read_failed_tasks, attempt_dir, hosts)
            new = [host for host in missing() if host in failed and host not in known]
            known.update(new)
            yield {
                host: await asyncio.to_thread(describe, host, failed[host], attempt_dir)
                for host in new
            }
        await asyncio.sleep(POLL_S)


# (pattern, cause), first match first: messages of rlpost, Python, Ray 2.60, enroot and the kernel.
_CAUSES = (
    ("no space left on device", "a disk is full there"),
    ("holds no secret", "its run folder is not the shared one"),
    (
        "did not find the head",
        "a firewall or the wrong network is between it and the head; see --socket-ifname",
    ),
    ("setup command failed", "one of --setup-commands fails there"),
    (
        r"\[error\] no such file|invalid image format|superblock|uncompress failed"
        r"|could not open image|can't stat: ",
        "its image is missing or damaged",
    ),
    (
        r"source path does not exist|enroot-mount: failed to mount: \S+ at \S+: no such file"
        r"|can't bind: source not found|mount source \S+ doesn't exist",
        "a folder of --container-mounts is missing there",
    ),
    (
        r"enroot-mount: failed to mount: \S+ at \S+: permission denied",
        "a folder of --container-mounts cannot be read there",
    ),
    (
        r"mkdir: cannot create directory|pyxis: couldn't mkdir",
        "enroot or pyxis cannot create its folder there",
    ),
    (
        r"failed to execute: /bin/(ba|da)?sh: permission denied",
        "ENROOT_DATA_PATH is on a file system mounted noexec there",
    ),
    (
        r"execve\(\): |exec: .*(not found|cannot execute)|failed to execute",
        "the interpreter is missing there",
    ),
    ("modulenotfounderror|no module named", "another Python environment or image is used there"),
    ("address already in use", "another process has one of the job's ports"),
    ("timed out during startup", "the machine is overloaded; submit again with --resume"),
    ("out of memory", "memory ran out"),
    (r"\boom\b|\boom-kill|oom_kill", "memory ran out"),
    ("permission denied", "a file or folder belongs to another user"),
    (
        "cannot be read: no such file",
        "its agent never started: the node is down, its image is still loading, or the run folder is not mounted",
    ),
)


def likely_cause(log: str) -> str:
    """The likely cause of a failure that the log shows; empty if none is known."""
    lower = log.lower()
    return next((cause for words, cause in _CAUSES if re.search(words, lower)), "")


def with_likely_cause(log: str) -> str:
    """The line that names the error, with its likely cause if one is known; then the text."""
    cause = likely_cause(log)
    reason = f" (probably {cause})" if cause else ""
    first = f"{deciding_line(log)}{reason}"
    return f"{first}\nlast lines:\n{log}" if "\n" in log.strip() else first
