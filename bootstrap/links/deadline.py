"""Determine when this job ends.

Input: Slurm's environment, and ``squeue`` if available (a container may lack it). Output: seconds
since 1970. Slurm moves the end of a job when it preempts the job (slurmctld, ``job_mgr.c``: end =
now + GraceTime) and when its time limit is changed, so a query at the signal takes precedence over
the environment variable set at the start.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from common.attempt import job_name

ASK_TIMEOUT_S = 10.0
ASK_AGAIN_S = 600.0
"""Interval between queries of the end of the job, which an operator may change."""
LEAVE_S = 10.0
"""Seconds before the deadline for the agent's verdict, so that the batch script can requeue."""


def seconds_for_the_driver(left_s: float | None, *, grace_s: float, lead_s: float) -> float:
    """Seconds to wait for a driver after a stop request: until just before the deadline.

    Without a deadline: ``grace_s``. If the deadline is hours away (a manual requeue), the longer of
    ``grace_s`` and ``lead_s`` limits the wait for a hanging driver.
    """
    return grace_s if left_s is None else min(max(left_s - LEAVE_S, 1.0), max(grace_s, lead_s))


def end_after_signal(
    queried: float | None, initial: float | None, *, now: float, lead_s: float
) -> float | None:
    """End of a job after a stop signal.

    ``queried``: Slurm's current answer, which takes precedence. Otherwise ``initial``, the end
    known at the start of the job, but at most ``lead_s`` seconds from now.
    """
    if queried is not None:
        return queried
    latest = now + lead_s
    return latest if initial is None else min(initial, latest)


class JobClock:
    """Clock of one job. Outside Slurm the job has no known end."""

    def __init__(
        self, environ: Mapping[str, str], *, lead_s: float, now: Callable[[], float] = time.time
    ) -> None:
        """``lead_s``: seconds before its end at which the job must receive a stop request."""
        self.lead_s = lead_s
        self.now = now
        self._job_id = job_name(environ)
        self._initial_end = _seconds(environ.get("SLURM_JOB_END_TIME", ""))

    async def end(self) -> float | None:
        """Currently known end of the job; None if unknown."""
        queried = await self._query_end()
        return self._initial_end if queried is None else queried

    async def end_after_signal(self, *, ask: bool) -> float | None:
        """Deadline of a stop request received now; ``ask``: query Slurm."""
        if not self._job_id:
            return None
        queried = await self._query_end() if ask else None
        return end_after_signal(queried, self._initial_end, now=self.now(), lead_s=self.lead_s)

    async def until_due(self) -> None:
        """Return when a stop request is due even without a signal; never if the end is unknown."""
        while (end := await self.end()) is not None:
            wait_s = end - self.lead_s - self.now()
            if wait_s <= 0:
                return
            await asyncio.sleep(min(wait_s, ASK_AGAIN_S))
        await asyncio.get_running_loop().create_future()

    async def _query_end(self) -> float | None:
        """End of the job from squeue; None outside Slurm or without an answer."""
        if not self._job_id:
            return None
        # SQUEUE_ variables of the user would change the output.
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SQUEUE_")}
        command = ["squeue", "--noheader", f"--jobs={self._job_id}", "--format=%e"]
        try:
            squeue = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environ | {"SLURM_TIME_FORMAT": "%s"},
            )
        except OSError:
            return None
        try:
            answer, _ = await asyncio.wait_for(squeue.communicate(), ASK_TIMEOUT_S)
        except TimeoutError:
            with suppress(ProcessLookupError):  # it has just exited
                squeue.kill()
            return None
        return _seconds(answer.decode(errors="replace"))


def _seconds(text: str) -> float | None:
    text = text.strip()
    return float(text) if text.isdecimal() and int(text) > 0 else None
