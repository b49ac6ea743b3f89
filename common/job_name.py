"""The id of a job for Slurm's commands. Python 3.6."""

from typing import Mapping


def job_name(environ: Mapping[str, str]) -> str:
    """The id of this job: ``ARRAY_TASK`` for a task of an array; empty outside a job.

    SLURM_JOB_ID does not identify a task: that of the last task is the id of the array, which means
    all tasks in Slurm's commands.

    >>> job_name({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"})
    '9_3'
    """
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    if not task:
        return environ.get("SLURM_JOB_ID", "")
    return f"{environ.get('SLURM_ARRAY_JOB_ID', '')}_{task}"
