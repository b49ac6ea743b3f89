"""What Slurm does at a preemption: the assumptions of the batch script."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest

from tests.cluster.fixtures import slurm_releases
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import LabError

# Batch shell and step print each signal that they receive, and do not end in the first run. Nor in
# the second: Slurm 24.05 to 25.11 restart a job that was preempted once again when it has ended.
RECORDER = """\
#!/bin/bash
#SBATCH --partition=low --exclusive --requeue --open-mode=append --signal=B:USR2@10 --time=5
trap 'echo batch USR2' USR2
trap 'echo batch TERM' TERM
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && { echo again; exec sleep 60; }
srun bash -c 'trap "echo step TERM" TERM; trap "echo step USR2" USR2; echo ready; while :; do sleep 0.1; done' &
while kill -0 $! 2>/dev/null; do wait $!; done
sleep 60 &
wait
"""


Kind = tuple[str | None, bool]
"""A lab's ``slurm`` and ``send_user_signal``."""


@pytest.fixture(scope="module")
def first_signals(slurm_available: None, pytestconfig: pytest.Config) -> dict[Kind, str]:
    """The first signal and its receiver. All labs run at the same time."""
    with contextlib.ExitStack() as stack:
        labs: dict[Kind, Lab] = {}
        for kind in itertools.product(slurm_releases(pytestconfig), (True, False)):
            options = LabOptions(
                grace_time_s=2, kill_wait_s=2, slurm=kind[0], send_user_signal=kind[1]
            )
            lab = Lab(1, name=f"p{os.getpid()}n{len(labs)}", options=options)
            with contextlib.suppress(LabError):  # without this Slurm its tests are skipped
                labs[kind] = stack.enter_context(lab)
        jobs = {
            kind: sbatch(lab, "recorder.sbatch", RECORDER, "--output=log")
            for kind, lab in labs.items()
        }
        for lab in labs.values():
            until(lambda lab=lab: "ready" in log_of(lab), lab, "the recorder is ready")
            sbatch(lab, "high.sbatch", "#!/bin/bash\n", "--partition=high", "--exclusive")
        for kind, lab in labs.items():
            until(
                lambda lab=lab: "again" in log_of(lab),
                lab,
                "the recorder runs again",
                deadline_s=90,
            )
            assert job_info(lab, jobs[kind]).num_restarts == 1
        return {kind: first_signal(log_of(lab)) for kind, lab in labs.items()}


def log_of(lab: Lab) -> str:
    log = lab.shared / "log"
    return log.read_text() if log.exists() else ""


def first_signal(log: str) -> str:
    return next(line for line in log.splitlines() if line.startswith(("batch ", "step ")))


@pytest.mark.every_slurm
def test_with_user_signal_the_batch_shell_is_signalled_first_and_slurm_requeues(
    slurm_release: str | None, first_signals: dict[Kind, str]
) -> None:
    """A job that exceeds its grace time is killed and requeued by Slurm."""
    assert first_signals[slurm_release, True] == "batch USR2"


@pytest.mark.every_slurm
def test_without_user_signal_the_steps_are_signalled_first_and_slurm_requeues(
    slurm_release: str | None, first_signals: dict[Kind, str]
) -> None:
    """The same with TERM; the batch shell gets no signal before the end of the grace time."""
    assert first_signals[slurm_release, False] == "step TERM"
