"""Verdict on an attempt: one word for the batch script and a cause for the user.

Input: an ``AttemptOutcome``, everything that the head agent observed. Output: a ``AttemptVerdict`` and its files.
``decide`` is pure and total: every outcome has a verdict.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common.attempt import EXCLUDE_FILE, VERDICT_FILE, VERDICT_JSON
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from common.files import write_atomic

Word = Literal["done", "requeue", "failed", "config"]


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The events of an attempt that decide its verdict.

    ``driver_code``: None if the driver did not exit by itself, negative after a signal.
    ``driver_cause``: the cause that the driver reported; empty if it reported none.
    """

    driver_code: int | None = None
    driver_tail: str = ""
    bringup_error: str | None = None
    lost: str | None = None  # cause of the loss of a node or of Ray
    stop_requested: bool = False  # externally, and before any loss
    bringup_verdict: Word = "failed"
    exclude: tuple[str, ...] = ()  # hosts to exclude from the next attempt
    driver_cause: str = ""
    was_up: bool = True  # the driver had the cluster when the stop was requested


@dataclass(frozen=True, slots=True)
class HostLoss:
    """Loss of a node or of Ray; ``exclude`` names the host if a restart there would fail again."""

    cause: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptVerdict:
    """The verdict, its cause, and the hosts to exclude from the next attempt."""

    verdict: Word
    cause: str
    exclude: tuple[str, ...] = ()


def decide(outcome: AttemptOutcome) -> AttemptVerdict:
    """Return the verdict on an attempt; the first matching rule applies."""
    code = outcome.driver_code
    if code == EXIT_DONE:
        return AttemptVerdict("done", "the driver ended with 0")
    if code == EXIT_CONFIG:
        return AttemptVerdict("config", _driver_said(code, outcome.driver_tail))
    if code == EXIT_PREEMPTED and (outcome.stop_requested or outcome.lost is None):
        return AttemptVerdict(
            "requeue", f"the driver committed a consistent state and exited with {code}"
        )
    if outcome.lost is not None:
        return AttemptVerdict("failed", outcome.lost, outcome.exclude)
    if code is not None and outcome.driver_cause:
        return AttemptVerdict(
            "failed", f"{outcome.driver_cause}\n{_driver_said(code, outcome.driver_tail)}"
        )
    if code is not None:
        return AttemptVerdict("failed", _driver_said(code, outcome.driver_tail))
    if outcome.bringup_error is not None:
        return AttemptVerdict(outcome.bringup_verdict, outcome.bringup_error, outcome.exclude)
    if outcome.stop_requested and not outcome.was_up:
        return AttemptVerdict(
            "requeue", "stopped before the run had started; nothing was to be saved"
        )
    if outcome.stop_requested:
        # The request was external, and everything committed before it is valid.
        return AttemptVerdict(
            "requeue", "a stop was requested and the driver did not exit before its deadline"
        )
    return AttemptVerdict("failed", "the agent stopped monitoring without a reason")


def write_verdict(attempt_dir: Path, verdict: AttemptVerdict) -> None:
    """Write ``exclude`` (one host per line), ``verdict.json`` and, last, ``verdict``."""
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
