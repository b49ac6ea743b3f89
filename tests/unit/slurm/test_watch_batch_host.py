"""The step that restarts a job acts exactly once, if the batch host is lost. That Slurm leaves such
a job running was observed in the lab (docs/preemption.md); here Slurm's commands are scripts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SQUEUE = """#!/bin/bash
# Each call prints the next line of the answers; the last one is repeated.
case $* in *%T*) echo RUNNING; exit ;; esac
read -r line <"{folder}/answers"
[ "$(wc -l <"{folder}/answers")" = 1 ] || sed -i 1d "{folder}/answers"
[ "$line" = down ] && exit 1
[ "$line" = none ] || echo "$line"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then [ "$3" ] && tr , '\\n' <<<"$3"; exit; fi
echo "scontrol $*" >>"{folder}/calls"
[ "$(wc -l <"{folder}/calls")" -gt {refusals} ] || {{ echo "{words}" >&2; exit 1; }}
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"{folder}/calls"
"""


def calls(
    folder: Path,
    policy: str,
    *answers: str,
    within_s: float = 20.0,
    refusals: int = 0,
    words: str = "",
) -> list[str]:
    """Commands of the script for these answers of squeue; [] if it still waits at the end."""
    folder.mkdir(exist_ok=True)
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
        (folder / name).write_text(text.format(folder=folder, refusals=refusals, words=words))
        (folder / name).chmod(0o755)
    (folder / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environ["RLPOST_WATCH_S"] = "0.02"
    command = [sys.executable, "-m", "slurm.batch", "watch", policy, "3"]
    watching = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    try:
        watching.wait(within_s)
    except subprocess.TimeoutExpired:
        watching.kill()
        watching.wait()
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_a_job_without_its_batch_host_is_requeued_with_all_its_nodes(tmp_path: Path) -> None:
    """After inconclusive answers: the controller is down, or the job is not running."""
    found = calls(tmp_path, "requeue", "n1 n1,n2,n3", "down", "none", "n1 n2,n3")
    assert found == ["scontrol requeue 7", "scontrol update JobId=7 NumNodes=3"]


def test_a_controller_that_refuses_at_first_costs_no_run(tmp_path: Path) -> None:
    """The next node that watches may be the last one."""
    found = calls(tmp_path, "requeue", "n1 n2,n3", refusals=1)
    assert found == ["scontrol requeue 7"] * 2 + ["scontrol update JobId=7 NumNodes=3"]


def test_where_slurm_must_not_requeue_the_job_is_cancelled(tmp_path: Path) -> None:
    """By the run's policy, or because Slurm refuses: it would hold its nodes to the time limit."""
    assert calls(tmp_path, "cancel", "n1 n2,n3") == ["scancel 7"]
    words = "Requested operation is presently disabled for job 7"
    found = calls(tmp_path / "x", "requeue", "n1 n2,n3", refusals=9, words=words)
    assert found == ["scontrol requeue 7", "scancel 7"]


@pytest.mark.parametrize("answer", ["n1 n1,n2", "n1 n1,n10", "down", "none"])
def test_a_job_with_its_batch_host_is_left_alone(tmp_path: Path, answer: str) -> None:
    assert calls(tmp_path, "requeue", answer, within_s=1.5) == []


def test_a_name_that_only_begins_like_the_batch_host_does_not_stand_for_it(tmp_path: Path) -> None:
    assert calls(tmp_path, "cancel", "n1 n10,n11") == ["scancel 7"]
