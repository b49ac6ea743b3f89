"""Detect nodes whose task failed before their agent joined: srun reports them long before the
deadline.

Input: ``launch.log`` of the attempt, which srun writes on the batch host, and the last lines of the
agents' logs.
Output: hosts, each with the reason. srun lists only failed tasks; a task that exits with 0 is found
at the deadline.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from bootstrap.agent.symptoms import with_likely_cause
from common.attempt import LAUNCH_LOG
from common.files import tail
from common.host_lists import HostListError, expand

POLL_S = 0.5
# Failures with one cause arrive together, and logs of other nodes take a moment to become visible
# here.
SETTLE_S = 1.0
_NUM_LINES = 8
_MAX_BYTES = 1 << 20
# Lines of srun (slurm, _task_finish in src/srun/launch.c; src/api/step_launch.c): tasks that ended,
# a node that did not accept its tasks, and a task that its node could not start. Hosts are a
# compact list or a task number.
_FAILED = (
    re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (.+)$", re.M),
    re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M),
)
_NOT_STARTED = re.compile(r"^srun: error: task (\d+) launch failed: (.+)$", re.M)


def failed_tasks(launch: str, hosts: Sequence[str]) -> dict[str, str]:
    """Hosts whose task has failed, each with srun's message; ``hosts``: hosts of the step by rank.
    Pure.
    """
    found = {
        hosts[int(task)]: how
        for task, how in _NOT_STARTED.findall(launch)
        if int(task) < len(hosts)
    }
    for pattern in _FAILED:
        for nodelist, how in pattern.findall(launch):
            try:
                found.update(dict.fromkeys(expand(nodelist), how))
            except HostListError:  # not a host list
                continue
    return found


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
        if (
            set(await asyncio.to_thread(read_failed_tasks, attempt_dir, hosts))
            & set(missing()) - known
        ):
            await asyncio.sleep(SETTLE_S)
            failed = await asyncio.to_thread(read_failed_tasks, attempt_dir, hosts)
            new = [host for host in missing() if host in failed and host not in known]
            known.update(new)
            yield {
                host: await asyncio.to_thread(describe, host, failed[host], attempt_dir)
                for host in new
            }
        await asyncio.sleep(POLL_S)
