"""When this job ends: by Slurm's own word, or as well as it can be known.

Comes in: Slurm's environment, and ``squeue`` where there is one (a container may have none). Goes out: seconds since
1970. Slurm moves the end of a job forward when it preempts it (slurmctld, ``job_mgr.c``: end = now + GraceTime) and
when somebody changes its time limit, so what is asked at a signal counts more than what was told at the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

ASK_TIMEOUT_S = 10.0
ASK_AGAIN_S = 600.0
"""Between two questions for the end, which an operator may have moved."""
LEAVE_S = 10.0
"""Before the deadline the agent writes its verdict, so that the batch script can requeue."""


def stop_text(reason: str, *, now: float, deadline: float | None) -> str:
    """What stands in a stop file; the batch script writes the same."""
    return json.dumps({"reason": reason, "time": round(now, 3), "deadline": deadline}) + "\n"


def deadline_of(stop_file: Path) -> float | None:
    """The deadline in a stop file; None without a file, or one that names none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        deadline = float(json.loads(stop_file.read_text())["deadline"])
        return deadline if deadline > 0 else None
    return None


def seconds_for_the_driver(left_s: float | None, *, grace_s: float, lead_s: float) -> float:
    """How long to wait for a driver that was asked to stop: until just before the deadline.

    Without one it is ``grace_s``. One that is hours away (somebody asked for a requeue) is no reason to wait for one
    that hangs: the longer of ``grace_s`` and ``lead_s`` is enough.
    """
    return grace_s if left_s is None else min(max(left_s - LEAVE_S, 1.0), max(grace_s, lead_s))


def end_after_signal(asked: float | None, told: float | None, *, now: float, lead_s: float) -> float | None:
    """The end of a job that was just told to stop: what Slurm answers now; else what it said when the job began, but
    not later than a grace period as long as the lead."""
    if asked is not None:
        return asked
    return now + lead_s if told is None else min(told, now + lead_s)


class JobClock:
    """Of one job. Outside Slurm it knows nothing, and nothing ends."""

    def __init__(self, environ: Mapping[str, str], *, lead_s: float, now: Callable[[], float] = time.time) -> None:
        """Args: ``lead_s``: so long before its end the job is to be told to stop."""
        self.lead_s = lead_s
        self.now = now
        self._job_id = environ.get("SLURM_JOB_ID", "")
        self._told = _seconds(environ.get("SLURM_JOB_END_TIME", ""))

    async def end(self) -> float | None:
        """When the job will end, as far as is known now."""
        asked = await self._ask()
        return self._told if asked is None else asked

    async def end_after_signal(self, *, ask: bool) -> float | None:
        """The deadline of a stop request that came just now; without ``ask`` Slurm is left alone."""
        if not self._job_id:
            return None
        asked = await self._ask() if ask else None
        return end_after_signal(asked, self._told, now=self.now(), lead_s=self.lead_s)

    async def until_due(self) -> None:
        """Returns when the job is to be told to stop though no signal came; never where nobody knows its end."""
        while (end := await self.end()) is not None:
            wait_s = end - self.lead_s - self.now()
            if wait_s <= 0:
                return
            await asyncio.sleep(min(wait_s, ASK_AGAIN_S))
        await asyncio.get_running_loop().create_future()

    async def _ask(self) -> float | None:
        if not self._job_id:
            return None
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
        command = ["squeue", "--noheader", f"--jobs={self._job_id}", "--format=%e"]
        try:
            asking = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environ | {"SLURM_TIME_FORMAT": "%s"},
            )
        except OSError:
            return None
        try:
            answer, _ = await asyncio.wait_for(asking.communicate(), ASK_TIMEOUT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):  # it has just ended
                asking.kill()
            return None
        return _seconds(answer.decode(errors="replace"))


def _seconds(text: str) -> float | None:
    text = text.strip()
    return float(text) if text.isdecimal() and int(text) > 0 else None
