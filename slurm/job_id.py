"""Ids of jobs: ``123``, ``123_4`` for a task of an array, ``123;CLUSTER`` on another cluster.

Input: texts of the ledger and of ``sbatch --parsable``. Output: their parts, as Slurm's commands
want them, or the reason why a submission has no id. Python 3.6.
"""

import os
import re
import subprocess
from typing import List, Mapping, Optional, Sequence

_PARSABLE = re.compile(r"[0-9]+(;[A-Za-z0-9_][A-Za-z0-9_-]*)?")
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?(;[A-Za-z0-9_][A-Za-z0-9_-]*)?")


def is_job_id(text: str) -> bool:
    """Whether a text names a job, or one task of an array.

    >>> [is_job_id(text) for text in ("12", "12_3", "12_3;gpu", "12;-u", "12_", "")]
    [True, True, True, False, False, False]
    """
    return _JOB_ID.fullmatch(text) is not None


def number_of(job: str) -> str:
    """The id without its cluster: ``123`` or ``123_4``."""
    return job.partition(";")[0]


def cluster_of(job: str) -> str:
    """The cluster of a job; empty for that of this host."""
    return job.partition(";")[2]


def on_cluster(number: str, cluster: str) -> str:
    """The id of a job on a cluster; empty: that of this host."""
    return f"{number};{cluster}" if cluster else number


def cluster_option(job: str) -> List[str]:
    """Option of Slurm's commands that leads to the cluster of a job.

    >>> ["scancel", *cluster_option("123;gpu"), number_of("123;gpu")]
    ['scancel', '--clusters=gpu', '123']
    """
    cluster = cluster_of(job)
    return [f"--clusters={cluster}"] if cluster else []


def read_submission(output: str) -> str:
    """The id in what ``sbatch --parsable`` printed; empty if there is none.

    Scripts that sites put in place of sbatch print more: banners, budgets, numbers. So it is the
    last line that is an id and nothing else (man sbatch, --parsable).

    >>> read_submission("project 42: 1000 hours left\\n123;gpu\\n")
    '123;gpu'
    >>> read_submission("Submitted batch job 123 on cluster gpu")
    ''
    """
    lines = (line.strip() for line in reversed(output.splitlines()))
    return next((line for line in lines if _PARSABLE.fullmatch(line)), "")


def find_by_script(script: str, environ: Mapping[str, str], *, but: str = "") -> List[str]:
    """Ids of this user's unfinished jobs of a batch file; none if Slurm does not answer.

    ``but``: number of a job to leave out.
    """
    clusters = environ.get("SBATCH_CLUSTERS", "")
    options = [f"--clusters={clusters}"] if clusters else []
    command = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %o"]
    shown = run_command([*command, *options], environ) or ""
    found = []
    for line in shown.splitlines():
        number, _, rest = line.strip().partition(" ")
        if rest.strip() == script and number != but and is_job_id(number):
            found.append(on_cluster(number, "" if "," in clusters else clusters))
    return found


def explain_submission(output: str, script: str, found: Sequence[str]) -> str:
    """Say that sbatch printed no id, what it printed, and how to find the job. Pure.

    ``found``: what ``find_by_script`` returned.
    """
    printed = f"printed {output.strip()!r}" if output.strip() else "printed nothing"
    if len(found) == 1:
        way = f"the job is {found[0]} (squeue shows its file, {script}); cancel it: scancel "
        way += " ".join([*cluster_option(found[0]), number_of(found[0])])
    else:
        way = f"look for it: squeue --user=$USER --format='%i %T %o' | grep {script}"
    return (
        f"sbatch --parsable {printed}, no line of which is a job id; the job may be submitted: {way}; "
        "then submit where sbatch is Slurm's own and SBATCH_ variables do not silence it"
    )


ANSWER_S = 10.0


def run_command(
    argv: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = ANSWER_S
) -> Optional[str]:
    """Output of a command of Slurm; None if it failed, is missing or does not answer in time."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            universal_newlines=True,
            errors="replace",
            timeout=timeout_s,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
