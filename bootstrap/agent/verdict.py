"""How an attempt ended, as one word for the batch script and one sentence for people.

Comes in: an ``Outcome``, all that the head agent saw. Goes out: a ``Verdict`` and its files. ``decide`` is pure
and total: whatever happened, there is a verdict.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bootstrap.agent.files import write_atomic
from bootstrap.handoff import EXCLUDE_FILE, EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED, VERDICT_FILE, VERDICT_JSON

Word = Literal["done", "requeue", "failed", "config"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened. ``driver_code`` is None when the driver had to be ended, negative when a signal ended it."""

    driver_code: int | None = None
    driver_tail: str = ""
    bringup_error: str | None = None
    lost: str | None = None  # the node or the Ray that ended by itself
    stop_requested: bool = False  # from outside, and before anything was lost
    bringup_verdict: Word = "failed"
    exclude: tuple[str, ...] = ()  # hosts that the next attempt must not get


@dataclass(frozen=True, slots=True)
class Loss:
    """A node or a Ray that ended by itself; ``exclude`` names the host when starting there again would fail again."""

    cause: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word, why, and which hosts the next attempt must not get."""

    verdict: Word
    cause: str
    exclude: tuple[str, ...] = ()


def decide(outcome: Outcome) -> Verdict:
    """The verdict on an attempt; the first rule that fits counts."""
    code = outcome.driver_code
    if code == EXIT_DONE:
        return Verdict("done", "the driver ended with 0")
    if code == EXIT_CONFIG:
        return Verdict("config", _driver_said(code, outcome.driver_tail))
    if code == EXIT_PREEMPTED and (outcome.stop_requested or outcome.lost is None):
        return Verdict("requeue", f"the driver committed what was consistent and ended with {code}")
    if outcome.lost is not None:
        return Verdict("failed", outcome.lost, outcome.exclude)
    if code is not None:
        return Verdict("failed", _driver_said(code, outcome.driver_tail))
    if outcome.bringup_error is not None:
        return Verdict(outcome.bringup_verdict, outcome.bringup_error, outcome.exclude)
    if outcome.stop_requested:
        # The request came from outside and what was committed before it is still good.
        return Verdict("requeue", "a stop was requested and the driver had not ended by itself when its time was over")
    return Verdict("failed", "the agent stopped watching without a reason")


def write_verdict(attempt_dir: Path, verdict: Verdict) -> None:
    """Leave the verdict in the attempt's folder: first for people, then the word that the batch script acts on.

    ``exclude`` holds one host a line; it is there before the word is.
    """
    if verdict.exclude:
        write_atomic(attempt_dir / EXCLUDE_FILE, "".join(f"{host}\n" for host in verdict.exclude))
    write_atomic(attempt_dir / VERDICT_JSON, json.dumps(asdict(verdict), indent=1) + "\n")
    write_atomic(attempt_dir / VERDICT_FILE, verdict.verdict + "\n")


def describe_exit(code: int) -> str:
    """``exit code 3`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _driver_said(code: int, driver_tail: str) -> str:
    return f"the driver ended with {describe_exit(code)}; its last lines:\n{driver_tail}"
