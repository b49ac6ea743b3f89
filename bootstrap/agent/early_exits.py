"""Detect nodes whose task failed before their agent joined, long before the deadline.

Input: ``launch.log`` of the attempt, which srun writes on the batch host, and the ends of the
agents' logs. Output: hosts, each with the reason. srun lists only failed tasks; a task that exits
with 0 is found at the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from bootstrap.agent.symptoms import with_likely_cause
from common.attempt import LAUNCH_LOG
from common.files import tail
from common.srun_output import failed_tasks

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
