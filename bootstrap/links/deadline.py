"""Determine when this job ends.

Input: ``squeue`` if available (a container may lack it), the file that the batch host keeps,
Slurm's environment. Output: seconds since 1970. Slurm moves the end of a job when it preempts the
job (slurmctld, ``job_mgr.c``: end = now + GraceTime) and when an operator changes its time limit: a
query takes precedence over the file, and the file over the variable set at the start.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from common.attempt import END_TIME_FILE, NO_END, job_name
from common.files import text_or_empty

ASK_TIMEOUT_S = 10.0
ASK_AGAIN_S = 600.0
"""Interval between queries of the end of the job, which an operator may change."""
READ_AGAIN_S = 30.0
"""Interval between reads of the batch host's file."""
LEAVE_S = 10.0
"""Seconds before the deadline for the agent's verdict, so that the batch script can requeue."""


def seconds_for_the_driver(left_s: float | None, *, grace_s: float, lead_s: float) -> float:
    """Seconds to wait for a driver after a stop request: until just before the deadline.

    Without a deadline: ``grace_s``. If the deadline is hours away (a manual requeue), the longer of
    ``grace_s`` and ``lead_s`` limits the wait for a hanging driver.
    """
    return grace_s if left_s is None else min(max(left_s - LEAVE_S, 1.0), max(grace_s, lead_s))


def end_after_signal(
    queried: float | None, known: float | None, *, now: float, lead_s: float
) -> float | None:
    """End of a job after a stop signal.

    ``queried``: Slurm's current answer, which takes precedence. Otherwise ``known``, the end from
    before the signal, but at most ``lead_s`` seconds from now.
    """
    if queried is not None:
        return queried
    latest = now + lead_s
    return latest if known is None else min(known, latest)


class JobClock:
    """Clock of one job. Outside Slurm the job has no known end."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        lead_s: float,
        attempt_dir: Path | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Describe the job of ``environ``.

        Args:
            lead_s: seconds before its end at which the job must receive a stop request.
            attempt_dir: where the batch host keeps the end of the job.
        """
        self.lead_s = lead_s
        self.now = now
        self._job_id = job_name(environ)
        self._initial_end = _seconds(environ.get("SLURM_JOB_END_TIME", ""))
        self._file = None if attempt_dir is None else attempt_dir / END_TIME_FILE

    async def end(self) -> float | None:
        """Currently known end of the job; None if unknown."""
        queried = await self._query_end()
        return await self._known_end() if queried is None else queried

    async def end_after_signal(self, *, ask: bool) -> float | None:
        """Deadline of a stop request received now; ``ask``: query Slurm."""
        if not self._job_id:
            return None
        queried = await self._query_end() if ask else None
        known = await self._known_end()
        return end_after_signal(queried, known, now=self.now(), lead_s=self.lead_s)

    async def until_due(self) -> None:
        """Return when a stop request is due even without a signal; never while no end is known."""
        while self._job_id:
            end = await self.end()
            wait_s = ASK_AGAIN_S if end is None else end - self.lead_s - self.now()
            if wait_s <= 0:
                return
            await self._sleep(min(wait_s, ASK_AGAIN_S))
        await asyncio.get_running_loop().create_future()

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or until the batch host writes another end of the job."""
        before, deadline = await self._known_end(), self.now() + seconds
        while (left_s := deadline - self.now()) > 0:
            await asyncio.sleep(min(left_s, READ_AGAIN_S))
            if await self._known_end() != before:
                return

    async def _known_end(self) -> float | None:
        """End of the job by the batch host's file, else as of the start; None without a limit."""
        if self._file is None:
            return self._initial_end
        # In a thread: a stalled shared file system must not stop the heartbeats.
        text = (await asyncio.to_thread(text_or_empty, self._file)).strip()
        if text == NO_END:
            return None
        written = _seconds(text)
        return self._initial_end if written is None else written

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
