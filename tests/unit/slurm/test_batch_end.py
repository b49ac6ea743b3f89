"""How a batch script ends when Slurm is slow, silent or refuses: the real script with fake Slurm
commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.ledger import Ledger
from slurm.container import Container
from slurm.render import render_sbatch
from slurm.spec import JobSpec

ROOT = Path(__file__).parents[3]
# srun leaves the agents' verdict; squeue is silent so often, then says STATE; whatever else is
# called writes its words.
STAND_INS = {
    "srun": """echo "srun $*" >>called
[ -e run/attempts/latest/verdict ] && exit
[ "$SIGNALLED" ] && kill -USR2 $PPID && until [ -e run/attempts/latest/STOP ]; do /bin/sleep 0.1; done
echo "$VERDICT" >run/attempts/latest/verdict
for ((n = 0; n < 10 * LINGERS; n++)); do /bin/sleep 0.1; done
echo "srun ended" >>called""",
    "scontrol": 'echo "scontrol $*" >>called',
    "squeue": """case $* in *%e) [ "$LEFT" ] && echo $(($(date +%s) + LEFT)); exit $? ;; esac
echo asked >>asked
[ "$(wc -l <asked)" -gt "$SILENT" ] || { echo 'Unable to contact slurm controller' >&2; exit 1; }
echo "$STATE"
""",
    "enroot": "exit 0",
    "timeout": 'while [[ $1 == -k ]]; do shift 2; done; echo "timeout $1 $2" >>called; shift; exec "$@"',
    "sleep": "exec /bin/sleep 0.1",
}


def run(
    folder: Path, *, container: Container | None = None, spare_nodes: int = 0, **given: object
) -> tuple[int, list[str], str]:
    """Exit code, called commands, and the log."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\ncd {folder}\n{text}\n")
        (commands / name).chmod(0o755)
    spec = JobSpec(
        home=str(ROOT),
        python=sys.executable,
        run_folder=str(folder / "run"),
        container=container,
        spare_nodes=spare_nodes,
    )
    environ = {
        "VERDICT": "requeue",
        "STATE": "RUNNING",
        "SILENT": "0",
        "LINGERS": "0",
        "LEFT": "",
        "SIGNALLED": "",
    }
    environ |= {name.upper(): str(value) for name, value in given.items()}
    environ |= {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n01",
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    (folder / "job.sbatch").write_text(render_sbatch(spec))
    with (folder / "log").open("w") as log:  # a file: srun outlives the script
        done = subprocess.run(
            ["bash", folder / "job.sbatch"],
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    called = (folder / "called").read_text().splitlines()
    return (
        done.returncode,
        [line for line in called if "squeue" not in line],
        (folder / "log").read_text(),
    )


def test_a_controller_that_is_restarting_costs_no_run(tmp_path: Path) -> None:
    _, called, log = run(tmp_path, silent=3)
    assert called[-1] == "scontrol requeue 7", log


def test_a_job_that_lost_a_node_is_requeued_with_as_many_as_it_asked_for(tmp_path: Path) -> None:
    """Slurm would start it with one node less each time, and finally with too few."""
    code, called, _ = run(tmp_path, spare_nodes=2)
    assert code == 0
    orders = [line for line in called if line.startswith("scontrol")]
    assert orders == ["scontrol requeue 7", "scontrol update JobId=7 NumNodes=3"]
    steps = [line for line in called if line.startswith("srun --no-kill")]
    assert sum("watch_batch_host.sh requeue 3" in line for line in steps) == 1
    assert any("--num-nodes 1 --spare-nodes 2" in line for line in steps)


def test_a_job_that_slurm_ends_is_not_requeued(tmp_path: Path) -> None:
    code, called, log = run(tmp_path, state="COMPLETING")
    assert code == 75 and not any(line.startswith("scontrol") for line in called)
    assert "job state is COMPLETING" in log


def test_a_cancelled_job_that_was_requeued_all_the_same_ends_before_it_begins(
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    Ledger(tmp_path / "run/ledger.jsonl").append("cancelled", job_id="7")
    code, called, log = run(tmp_path)
    assert code == 75 and called == [], log
    assert "was cancelled" in log and "no budgets" not in log


def test_an_srun_that_lingers_costs_no_run_whose_time_is_nearly_over(tmp_path: Path) -> None:
    """Agents write their verdict ten seconds before the end even if something hangs; after the end
    a job cannot be requeued.
    """
    _, called, log = run(tmp_path, left=7, lingers=10)
    assert called[1:] == ["scontrol requeue 7"], log


@pytest.mark.parametrize(("left", "seconds"), [(30, 30), ("", 120)])
def test_a_stop_request_has_a_deadline_also_when_slurm_does_not_tell_it(
    tmp_path: Path, left: int | str, seconds: int
) -> None:
    """A driver without a deadline would use all the time, and the job would end before it is
    requeued.
    """
    _, called, log = run(tmp_path, left=left, signalled="yes")
    stop = json.loads((tmp_path / "run/attempts/0/STOP").read_text())
    assert int(stop["deadline"]) - stop["time"] == pytest.approx(seconds, abs=3), log
    assert called[-1] == "scontrol requeue 7", log


@pytest.mark.slow
def test_a_container_is_removed_in_the_time_that_is_left(tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    for left, seconds in (("", 60), (3600, 60), (25, 20), (3, 1)):
        folder = tmp_path / f"left-{left}"
        folder.mkdir()
        _, called, log = run(folder, left=left, container=Container("enroot", str(image)))
        given = [
            int(line.split()[1])
            for line in called
            if line.startswith("timeout") and line.endswith("srun")
        ]
        assert len(given) == 1 and seconds - 3 <= given[0] <= seconds, log
