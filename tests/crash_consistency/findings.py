"""Assign problems to the known findings, so that new ones stand out in the table."""

from __future__ import annotations

from tests.crash_consistency import oracle
from tests.crash_consistency.oracle import Problem
from tests.crash_consistency.scenarios import Result

FINDINGS = {
    "F1": "an older attempt destroys the checkpoint of a newer one",
    "F2": "a hole in the journal goes unnoticed, or ends the run for good",
    "F3": "metrics and samples are neither fenced nor robust against damage",
    "F4": "skipped rows are counted twice after a crash",
    "F5": "changed data is accepted silently, or attributed to another run",
    "F6": "a damaged line of the ledger ends the attempt with a traceback",
    "F7": "failing or hanging storage ends the attempt with a traceback, or blocks its event loop",
    "F8": "the journal's folder is lost with the power",
    "F9": "the checkpoint just committed is pruned",
}


_OF_PAIRS = {
    oracle.DESTROYED: "F1",
    oracle.NEVER: "F1",
    oracle.METRICS: "F3",
    oracle.SAMPLES: "F3",
    oracle.TRACEBACK: "F7",
}


def finding(result: Result, problem: Problem) -> str:
    """Return the finding of a problem: F1 to F9, or "new"."""
    scenario, category, detail, note = (
        result.trial.scenario,
        problem.category,
        problem.detail,
        result.note,
    )
    if category == oracle.COUNTS:
        return "F4"
    if scenario == "fault" and category in (oracle.TRACEBACK, oracle.HUNG, oracle.LEDGER):
        return "F7"
    if scenario == "fault" and category == oracle.NEVER and ("latest" in note or "metrics" in note):
        return "F7"
    if scenario == "two_attempts":
        return _OF_PAIRS.get(category, "new")
    if scenario == "damage":
        return _of_damage(category, detail, note)
    if "strict" in result.trial.what or scenario in ("power", "stop"):
        return "F8" if category in (oracle.AGAIN, oracle.RETRAINED) else "new"
    if scenario == "change" and category in (oracle.NEVER, oracle.SILENT):
        return "F5"
    return "new"


def _of_damage(category: str, detail: str, note: str) -> str:
    if "journal" in note:
        return "F2"
    if "metrics.jsonl" in note or "samples.jsonl" in note:
        return "F3"
    if "ledger" in note and "KeyError" in detail:
        return "F6"
    return "F9" if category == oracle.DESTROYED else "new"
