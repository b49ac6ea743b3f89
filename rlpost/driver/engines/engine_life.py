"""Tell a busy engine from one that hangs.

Input: health checks of one engine. Output: None while it works or computes, else the reason why it
counts as dead.

A health check passes when the scheduler of SGLang sends anything within 20 s: a token, or the answer
to the check (``/health_generate``). A forward pass that takes longer, such as a long prefill on a
busy CPU, sends nothing until it ends. So an engine that is silent but uses CPU time, as a process in
a forward pass does on any device, is left alone up to a limit, which grows with the longest silence
that ended by itself:

    no answer of the HTTP server               dead at once
    silent, no CPU time                        dead at once, or after SLOWER_IDLE x longest silence
    silent, with CPU time                      dead after BUSY_LIMIT_S or SLOWER_BUSY x longest silence
    silent, CPU time unknown (not our server)  as with CPU time

So with the default of one check every 30 s of at most 30 s, an engine that hangs without CPU time is
found within 80 s, and one that spins in a call within BUSY_LIMIT_S and 80 s.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from rlpost.engines.engine_activity import PATH
from rlpost.engines.engine_client import EngineClient
from rlpost.errors import RolloutError

logger = logging.getLogger(__name__)

BUSY_LIMIT_S = 300.0
"""SGLang ends a scheduler itself after a forward pass of this length (``--watchdog-timeout``)."""
SLOWER_BUSY, SLOWER_IDLE = 10.0, 3.0
COMPUTES_FROM = 0.01
"""CPU cores in use from which an engine computes: a share of 1/100 beside other load."""
ACTIVITY_S = 10.0


class EngineLife:
    """The health of one engine over its checks. Times are seconds of a monotonic clock.

    No engine is checked between batches, as while the policy is trained. So of the time between two
    checks at most ``interval_s``, that of checks, counts as silence.
    """

    def __init__(self, name: str, interval_s: float) -> None:
        self._name, self._interval_s = name, interval_s
        self._silent_s = self._longest_silence_s = 0.0
        self._silent_at: float | None = None
        """When the last check ended, if it did not pass."""

    def note_pass(self, now: float) -> None:
        """Record a check that passed."""
        self._count_silence(now)
        self._longest_silence_s = max(self._longest_silence_s, self._silent_s)
        self.forget_silence()

    def forget_silence(self) -> None:
        """Forget the current silence; the next process is as slow as the one before."""
        self._silent_s, self._silent_at = 0.0, None

    def _count_silence(self, until: float) -> None:
        """Count the time since the last check that did not pass, if it was the last of all."""
        if self._silent_at is not None:
            self._silent_s += min(max(0.0, until - self._silent_at), self._interval_s)

    def silent(self, began: float, now: float, cores: float | None) -> str | None:
        """Record a check from ``began`` to ``now`` that did not pass; return why it is dead.

        ``cores`` is the CPU time of its schedulers during the check per second, None if unknown.
        """
        self._count_silence(began)
        self._silent_s += now - began
        self._silent_at = now
        silent_s = self._silent_s
        is_idle = cores is not None and cores < COMPUTES_FROM
        limit_s = max(BUSY_LIMIT_S, SLOWER_BUSY * self._longest_silence_s)
        if is_idle:
            limit_s = SLOWER_IDLE * self._longest_silence_s
        used = "unknown" if cores is None else f"{cores:.2f} cores"
        words = f"no answer for {silent_s:.0f} s (CPU use {used}, limit {limit_s:.0f} s)"
        if silent_s >= limit_s:
            return words
        logger.warning("engine %s is busy and is not restarted: %s", self._name, words)
        return None


@dataclass(frozen=True, slots=True)
class Activity:
    """Whether the HTTP server of an engine answers, and CPU seconds of its schedulers if known."""

    answers: bool
    cpu_s: float | None = None


async def check_engine(client: EngineClient, life: EngineLife) -> str | None:
    """Let an engine generate a token; return why it counts as dead, or None."""
    began, before = time.monotonic(), await _activity(client)
    problem = await failure(client, "/health_generate")
    if problem is None:
        life.note_pass(time.monotonic())
        return None
    after = await _activity(client)
    if not after.answers:
        return problem
    now, cores = time.monotonic(), None
    if before.cpu_s is not None and after.cpu_s is not None:
        cores = (after.cpu_s - before.cpu_s) / max(now - began, 1e-3)
    silence = life.silent(began, now, cores)
    return None if silence is None else f"{problem}: {silence}"


async def failure(client: EngineClient, path: str) -> str | None:
    """Return why a GET of ``path`` failed, None if it succeeded."""
    try:
        await client.request("GET", path, None)
    except RolloutError as error:
        return str(error)
    return None


async def _activity(client: EngineClient) -> Activity:
    asking = replace(client, timeout_s=min(ACTIVITY_S, client.timeout_s))
    try:
        found = await asking.request("GET", PATH, None, missing_ok=True)
    except RolloutError:
        return Activity(answers=False)
    cpu_s = found.get("cpu_s") if isinstance(found, dict) else None
    return Activity(answers=True, cpu_s=cpu_s)
