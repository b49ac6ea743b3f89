"""``rlpost status`` and ``rlpost list``: where runs stand, from their folders and one question to Slurm.

In: run folders and what the queue says. Out: ``Status`` values, shown as a table in a terminal and as JSON to machines.
Whatever cannot be read is left blank: a status never fails on half a run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rlpost.cli.runs import (
    LOCAL,
    add_run_options,
    add_runs_dir,
    all_runs,
    find_run,
    job_ids,
    last,
    local_is_alive,
    settings_of,
)
from rlpost.metrics.progress import duration
from rlpost.metrics.writer import eval_rewards, read_metrics
from slurm.queue import QueueEntry, queue
from slurm.run_folder import RunFolder
from slurm.states import JobState

PACE_STEPS = 10  # the pace shown is that of the last steps
STATE_COLOURS = {"RUNNING": "green", "COMPLETED": "green", "PENDING": "yellow", "FAILED": "red", "NODE_FAIL": "red"}
_OUTCOME_STATES = {"done": JobState.COMPLETED, "requeue": JobState.CANCELLED, None: JobState.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Status:
    """One run. ``state`` is Slurm's; ``verdict`` that of the newest attempt; None and empty mean not known (yet).

    ``attempt`` is the name of the newest attempt's folder; ``reward`` the mean of the last step; ``evals`` the newest
    mean reward of each evaluation set.
    """

    name: str
    folder: str
    job_id: str | None
    state: str
    reason: str = ""
    expected_start: str = ""
    nodelist: str = ""
    time_left_s: int | None = None
    attempt: str | None = None
    verdict: str | None = None
    cause: str = ""
    step: int = 0
    num_steps: int | None = None
    reward: float | None = None
    evals: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    step_s: float | None = None
    eta_s: float | None = None
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    checkpoint_time: str | None = None


def statuses(runs: Sequence[RunFolder]) -> list[Status]:
    """Where each of these runs stands; one question to Slurm for all of them."""
    ids = {run.root: (job_ids(run) or [None])[-1] for run in runs}
    entries = queue([job_id for job_id in ids.values() if job_id and not job_id.startswith(LOCAL)])
    return [status_of(run, ids[run.root], entries.get(ids[run.root] or "")) for run in runs]


def status_of(run: RunFolder, job_id: str | None, entry: QueueEntry | None) -> Status:
    """Where a run stands, ``entry`` being what Slurm said of its job."""
    latest = run.attempts / "latest"
    verdict = _text(latest / "verdict")
    entry = entry or QueueEntry("", _local_state(job_id, verdict))
    committed = last(run.ledger.read(), "committed")
    return Status(
        name=run.root.name,
        folder=str(run.root),
        job_id=job_id,
        state=str(entry.state),
        reason=entry.reason,
        expected_start=entry.expected_start if entry.state is JobState.PENDING else "",
        nodelist=entry.nodelist,
        time_left_s=entry.time_left_s,
        attempt=latest.resolve().name if latest.exists() else None,
        verdict=verdict,
        cause=_cause(latest / "verdict.json"),
        checkpoint=committed.get("checkpoint"),
        checkpoint_step=committed.get("step"),
        checkpoint_time=committed.get("time"),
        **_progress(run),
    )


def _progress(run: RunFolder) -> dict[str, Any]:
    lines = read_metrics(run.metrics)
    total = settings_of(run).get("rollout", {}).get("num_rollout")
    if not lines:
        return {"num_steps": total}
    step = int(lines[-1]["step"])
    paces = [line["time/step_s"] for line in lines[-PACE_STEPS:] if "time/step_s" in line]
    pace = mean(paces) if paces else None
    evals = {name.split("/")[1]: line[name] for line in lines for name in eval_rewards(line)}
    return {
        "step": step,
        "num_steps": total,
        "reward": lines[-1].get("reward/mean"),
        "evals": evals,
        "tokens_per_s": lines[-1].get("time/tokens_per_s"),
        "step_s": pace,
        "eta_s": None if pace is None or total is None else pace * (total - step),
    }


def _local_state(job_id: str | None, verdict: str | None) -> JobState:
    if job_id is None or not job_id.startswith(LOCAL):
        return JobState.UNKNOWN
    if local_is_alive(job_id):
        return JobState.RUNNING
    return _OUTCOME_STATES.get(verdict, JobState.FAILED)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _cause(path: Path) -> str:
    try:
        return str(json.loads(path.read_text()).get("cause", ""))
    except (OSError, ValueError):
        return ""


# -- shown ------------------------------------------------------------------------------------------------------


def rows(status: Status) -> list[tuple[str, str]]:
    """What a person reads of one run: (name, value), only what is known."""
    of = f"/{status.num_steps}" if status.num_steps else ""
    pace = f", {status.step_s:.2f} s a step" if status.step_s is not None else ""
    shown = [
        ("run", status.name),
        ("folder", status.folder),
        ("job", status.job_id or "never submitted"),
        ("state", status.state),
        ("why", status.reason),
        ("expected start", status.expected_start),
        ("nodes", status.nodelist),
        ("time left", "" if status.time_left_s is None else duration(status.time_left_s)),
        ("attempt", status.attempt or ""),
        ("verdict", f"{status.verdict}: {status.cause}" if status.verdict else ""),
        ("step", f"{status.step}{of}" + (f", done in {duration(status.eta_s)}" if status.eta_s else "")),
        ("reward", "" if status.reward is None else f"{status.reward:.3f}"),
        ("evaluation", ", ".join(f"{name} {value:.3f}" for name, value in status.evals.items())),
        ("throughput", "" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f} tokens/s{pace}"),
        ("checkpoint", f"{status.checkpoint} at {status.checkpoint_time}" if status.checkpoint else ""),
    ]
    return [(name, value) for name, value in shown if value]


def show(found: Sequence[Status], *, as_json: bool, one: bool) -> None:
    """Print: JSON (an object for one run, a list for several), or a table, coloured in a terminal."""
    if as_json:
        content = [asdict(status) for status in found]
        print(json.dumps(content[0] if one else content, indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A pipe has no width of its own, and a folder must not be cut.
    console = Console(width=None if sys.stdout.isatty() else 400)

    def cell(name: str, value: str) -> Text:
        return Text(value, style=STATE_COLOURS.get(value, "") if name == "state" else "")

    if one:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in rows(found[0]):
            table.add_row(Text(name, style="bold"), cell(name, value))
    else:
        columns = ("run", "job", "state", "why", "attempt", "step", "reward", "checkpoint")
        table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
        for status in found:
            values = dict(rows(status))
            table.add_row(*(cell(name, values.get(name, "")) for name in columns))
    console.print(table)


def status_main(arguments: Sequence[str]) -> int:
    """``rlpost status [RUN] [--json | --watch]``."""
    made = argparse.ArgumentParser(prog="rlpost status", description="Where a run stands.")
    add_run_options(made)
    how = made.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="for machines")
    how.add_argument("--watch", action="store_true", help="a page in the terminal that follows the run; Ctrl-C leaves")
    options = made.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    if options.watch:
        from rlpost.cli.watch import watch

        return watch(run)
    show(statuses([run]), as_json=options.json, one=True)
    return 0


def list_main(arguments: Sequence[str]) -> int:
    """``rlpost list [--json] [--num N]``."""
    made = argparse.ArgumentParser(prog="rlpost list", description="The runs of a folder, the newest first.")
    add_runs_dir(made)
    made.add_argument("--num", type=int, default=20, metavar="N", help="how many at most (default: 20)")
    made.add_argument("--json", action="store_true", help="for machines")
    options = made.parse_args(arguments)
    show(statuses(all_runs(options.runs_dir)[: options.num]), as_json=options.json, one=False)
    return 0
