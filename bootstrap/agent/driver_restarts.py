"""Decide whether a driver that died is started again in its attempt. Pure, except ``last_step``.

Input: its death, whether the attempt is ending, and the earlier deaths. Output: None, or the
reason why the attempt ends instead; the batch script then decides about a whole restart.

A driver that ends deliberately (finished, preempted, bad settings, a known error) is not started
again, nor after TERM. A driver that dies twice within ``WINDOW_S`` seconds without a trained step
between the two deaths is expected to die again, and is not started again either.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

from common.exit_codes import EXIT_CRASHED
from common.files import tail_or_empty

WINDOW_S = 600.0
LAST_LINES_BYTES = 65_536
CRASHES = (
    signal.SIGKILL,  # the kernel, out of memory
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
)


@dataclass(frozen=True, slots=True)
class DriverDeath:
    """One death of a driver.

    ``code`` is its exit code, negative for a signal. ``at`` is in seconds of a monotonic clock.
    ``step`` is the newest trained step, -1 before the first.
    """

    code: int
    at: float
    step: int


def reason_to_end(
    death: DriverDeath, earlier: tuple[DriverDeath, ...], *, max_restarts: int, is_ending: bool
) -> str | None:
    """Return why the attempt ends after this death; None to start the driver again.

    Args:
        earlier: deaths in this attempt after which it was started again.
        is_ending: a stop was requested, or a node or Ray is lost.
    """
    if not is_crash(death.code):
        return "the driver ended by itself"
    if is_ending:
        return "the attempt is ending"
    if len(earlier) >= max_restarts:
        return f"the driver was started again {len(earlier)} times already, the maximum"
    recent = [one for one in earlier if death.at - one.at < WINDOW_S]
    if recent and death.step <= max(one.step for one in recent):
        return (
            f"the driver has died {len(recent) + 1} times within {WINDOW_S:.0f} s "
            "without a newly trained step"
        )
    return None


def is_crash(code: int) -> bool:
    """Whether a driver that ended with ``code`` may work when it is started again."""
    return code == EXIT_CRASHED or -code in CRASHES


def last_step(metrics: Path) -> int:
    """The step of the last complete line of ``metrics.jsonl``; -1 without one. Blocks."""
    for line in reversed(tail_or_empty(metrics, LAST_LINES_BYTES).splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
