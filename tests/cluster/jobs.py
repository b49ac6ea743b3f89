"""Submitting to the lab and asking it, for the tests of this folder and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurm.states import JobInfo, parse_job
from tests.cluster.lab import Lab
from tests.cluster.lab_host import wait_until


def sbatch(
    lab: Lab, name: str, script: str, *options: str, inside: Sequence[str] = (), **kwargs: object
) -> str:
    """Submit a script from the lab's shared folder, or from ``cwd=``; its job id.

    ``inside``: the command, such as srun's, that does it.
    """
    path = lab.shared / name
    path.write_text(script)
    return lab.run(
        "ctl", [*inside, "sbatch", "--parsable", *options, str(path)], **kwargs
    ).stdout.strip()


def job_info(lab: Lab, job: str) -> JobInfo:
    """What the lab's controller says about the job."""
    return parse_job(lab.run("ctl", ["scontrol", "--oneliner", "show", "job", job]).stdout)


def until(condition: Callable[[], bool], lab: Lab, what: str, *, deadline_s: float = 60.0) -> None:
    """Wait for something to happen in the lab; fails with the state of the lab."""
    if wait_until(condition, deadline_s=deadline_s):
        return
    jobs = lab.run("ctl", ["scontrol", "--oneliner", "show", "job"], check=False).stdout
    raise AssertionError(f"not in {deadline_s:g} s: {what}\n{jobs}\n{lab.log_tail()}")
