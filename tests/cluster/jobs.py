"""Submit jobs to the lab and query them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurm.states import JobInfo, parse_job
from tests.cluster.lab import Lab
from tests.cluster.lab_host import wait_until


def sbatch(
    lab: Lab, name: str, script: str, *options: str, inside: Sequence[str] = (), **kwargs: object
) -> str:
    """Submit a script from the lab's shared folder, or from ``cwd=``; return the job id.

    ``inside``: a command such as ``salloc`` that runs sbatch.
    """
    path = lab.shared / name
    path.write_text(script)
    return lab.run(
        "ctl", [*inside, "sbatch", "--parsable", *options, str(path)], **kwargs
    ).stdout.strip()


def job_info(lab: Lab, job: str) -> JobInfo:
    """The job as the lab's controller shows it."""
    return parse_job(lab.run("ctl", ["scontrol", "--oneliner", "show", "job", job]).stdout)


def only_step(lab: Lab, job: str) -> str:
    """The id of the step of a job that has one, once others have ended.

    Its number is not always 0: where slurmctld answers late, srun asks for another step.
    """
    query = ["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i"]

    def steps() -> list[str]:
        shown = lab.run("ctl", query).stdout.split()
        return [step for step in shown if step.rpartition(".")[2].isdecimal()]  # not .batch

    until(lambda: len(steps()) == 1, lab, f"one step of job {job}")
    (step,) = steps()
    return step


def until(condition: Callable[[], bool], lab: Lab, what: str, *, deadline_s: float = 180.0) -> None:
    """Wait for a condition; at the deadline, fail with the jobs and logs of the lab."""
    if wait_until(condition, deadline_s=deadline_s):
        return
    jobs = lab.run("ctl", ["scontrol", "--oneliner", "show", "job"], check=False).stdout
    raise AssertionError(f"not within {deadline_s:g} s: {what}\n{jobs}\n{lab.log_tail()}")
