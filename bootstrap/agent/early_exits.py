"""Nodes whose task ended before their agent joined: srun knows within a moment what a deadline tells in minutes.

Input: ``launch.log`` of the attempt, which srun writes on the batch host, and the ends of agents' logs. Output: hosts,
each with the reason. Only tasks that failed are listed there; one that ended with 0 is left to the deadline.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from bootstrap.agent.files import tail
from bootstrap.agent.identity import FactsError, expand_hosts
from bootstrap.agent.symptoms import with_likely_cause
from bootstrap.handoff import LAUNCH_LOG

POLL_S = 0.5
# Failures for one reason come together, and a log of another node takes a moment to be seen here.
SETTLE_S = 1.0
_NUM_LINES = 8
_MAX_BYTES = 1 << 20
# Lines of srun (slurm, _task_finish in src/srun/launch.c; src/api/step_launch.c): of tasks that ended, of a node that
# did not take its tasks, and of a task that its node could not start. Hosts are a compact list, or a task's number.
_FAILED = (
    re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (.+)$", re.M),
    re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.M),
)
_NOT_STARTED = re.compile(r"^srun: error: task (\d+) launch failed: (.+)$", re.M)


def failed_tasks(launch: str, hosts: Sequence[str]) -> dict[str, str]:
    """Hosts whose task has failed, each with srun's words; ``hosts`` are those of the step by rank. Pure."""
    found = {hosts[int(task)]: how for task, how in _NOT_STARTED.findall(launch) if int(task) < len(hosts)}
    for pattern in _FAILED:
        for nodelist, how in pattern.findall(launch):
            try:
                found.update(dict.fromkeys(expand_hosts(nodelist), how))
            except FactsError:  # a text of another shape
                continue
    return found


def read_failed_tasks(attempt_dir: Path, hosts: Sequence[str]) -> dict[str, str]:
    """The same of an attempt, so far; empty where srun has said nothing."""
    try:
        with (attempt_dir / LAUNCH_LOG).open("rb") as file:
            return failed_tasks(file.read(_MAX_BYTES).decode(errors="replace"), hosts)
    except OSError:
        return {}


def describe(host: str, how: str, attempt_dir: Path) -> str:
    """One host's end in srun's words, with its log's last lines and what they mean."""
    log = with_likely_cause(tail(attempt_dir / f"agent-{host}.log", _NUM_LINES))
    return f"{host} failed before it joined: {how}: {log}"


async def failures_before_joining(
    attempt_dir: Path, hosts: Sequence[str], missing: Callable[[], Collection[str]]
) -> AsyncIterator[dict[str, str]]:
    """Each time some of the missing hosts have failed: these, with their reasons. Ends when none is missing."""
    known: set[str] = set()
    while missing():
        if set(await asyncio.to_thread(read_failed_tasks, attempt_dir, hosts)) & set(missing()) - known:
            await asyncio.sleep(SETTLE_S)
            failed = await asyncio.to_thread(read_failed_tasks, attempt_dir, hosts)
            new = [host for host in missing() if host in failed and host not in known]
            known.update(new)
            yield {host: await asyncio.to_thread(describe, host, failed[host], attempt_dir) for host in new}
        await asyncio.sleep(POLL_S)
