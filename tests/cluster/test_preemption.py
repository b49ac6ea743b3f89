"""What Slurm does at a preemption: the assumptions of the batch script."""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions

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


@pytest.fixture(scope="module")
def first_signals(slurm_release: str | None) -> dict[bool, str]:
    """The first signal and its receiver, by ``send_user_signal``. Both labs run at the same time."""
    with contextlib.ExitStack() as stack:
        labs = {}
        for send_user_signal in (True, False):
            options = LabOptions(
                grace_time_s=2,
                kill_wait_s=2,
                send_user_signal=send_user_signal,
                slurm=slurm_release,
            )
            name = f"p{os.getpid()}{send_user_signal}".lower()
            labs[send_user_signal] = stack.enter_context(Lab(1, name=name, options=options))
        jobs = {
            key: sbatch(lab, "recorder.sbatch", RECORDER, "--output=log")
            for key, lab in labs.items()
        }
        for lab in labs.values():
            until(lambda lab=lab: "ready" in log_of(lab), lab, "the recorder is ready")
            sbatch(lab, "high.sbatch", "#!/bin/bash\n", "--partition=high", "--exclusive")
        for key, lab in labs.items():
            until(
                lambda lab=lab: "again" in log_of(lab),
                lab,
                "the recorder runs again",
                deadline_s=90,
            )
            assert job_info(lab, jobs[key]).num_restarts == 1
        return {key: first_signal(log_of(lab)) for key, lab in labs.items()}


def log_of(lab: Lab) -> str:
    log = lab.shared / "log"
    return log.read_text() if log.exists() else ""


def first_signal(log: str) -> str:
    return next(line for line in log.splitlines() if line.startswith(("batch ", "step ")))


@pytest.mark.every_slurm
def test_with_user_signal_the_batch_shell_is_signalled_first_and_slurm_requeues(
    first_signals: dict[bool, str],
) -> None:
    """A job that exceeds its grace time is killed and requeued by Slurm."""
    assert first_signals[True] == "batch USR2"


@pytest.mark.every_slurm
def test_without_user_signal_the_steps_are_signalled_first_and_slurm_requeues(
    first_signals: dict[bool, str],
) -> None:
    """The same with TERM; the batch shell gets no signal before the end of the grace time."""
    assert first_signals[False] == "step TERM"
