"""Ids of jobs: ``123``, ``123_4`` for a task of an array, ``123;CLUSTER`` on another cluster.

Also the times that squeue prints.

Input: texts of the ledger and of ``sbatch --parsable``. Output: their parts, as Slurm's commands
want them, or the reason why a submission has no id. Python 3.6.
"""

import os
import re
import subprocess
from typing import Collection, List, Mapping, Optional, Sequence

_PARSABLE = re.compile(r"[0-9]+(;[A-Za-z0-9_][A-Za-z0-9_-]*)?")
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
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
    line that is an id and nothing else (man sbatch, --parsable); of several none can be believed.

    >>> read_submission("project 42: 1000 hours left\\n123;gpu\\n")
    '123;gpu'
    >>> read_submission("Submitted batch job 123 on cluster gpu"), read_submission("123\\n1000")
    ('', '')
    """
    ids = printed_ids(output)
    return ids[0] if len(ids) == 1 else ""


def printed_ids(output: str) -> List[str]:
    """The lines of an output that are an id of a job and nothing else, each once."""
    lines = (line.strip() for line in output.splitlines())
    return list(dict.fromkeys(line for line in lines if _PARSABLE.fullmatch(line)))


def find_by_script(
    script: str, environ: Mapping[str, str], *, but: Collection[str] = ()
) -> Optional[List[str]]:
    """Ids of this user's jobs of a batch file, arrays as one; None if Slurm does not answer.

    Jobs that have ended count while Slurm remembers them (MinJobAge). ``but``: numbers of jobs to
    leave out.
    """
    cluster = environ.get("SBATCH_CLUSTERS", "")
    command = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%F %o", "--states=all"]
    command += [f"--clusters={cluster}"] if cluster else []
    shown = run_command(command, environ, is_quiet=True)
    if shown is None:
        return None
    cluster = "" if "," in cluster else cluster
    jobs = []
    for line in shown.splitlines():
        number, _, rest = line.strip().partition(" ")
        if number == "CLUSTER:":  # before the jobs of each of several clusters
            cluster = rest.strip()
        # squeue shows the file with its arguments
        is_of_script = rest.strip() == script or rest.startswith(f"{script} ")
        if is_of_script and number not in but and is_job_id(number):
            jobs.append(on_cluster(number, cluster))
    return list(dict.fromkeys(jobs))


def explain_submission(output: str, script: str) -> str:
    """Say that sbatch printed no id, what it printed, and how to find the job. Pure."""
    printed = f"printed {output.strip()!r}" if output.strip() else "printed nothing"
    return (
        f"sbatch --parsable {printed}, which does not name one job id; the job may be submitted: "
        f"look for it: squeue --user=$USER --format='%i %T %o' | grep {script}"
    )


def seconds_in(text: str) -> Optional[int]:
    """A time of squeue in seconds; None for NOT_SET, UNLIMITED and INVALID.

    >>> [seconds_in(text) for text in ("1-02:03:04", "2:00", "UNLIMITED")]
    [93784, 120, None]
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


ANSWER_S = 10.0


def run_command(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    timeout_s: float = ANSWER_S,
    is_quiet: bool = False,
) -> Optional[str]:
    """Output of a command of Slurm; None if it failed, is missing or does not answer in time.

    ``is_quiet``: its errors are not shown.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if is_quiet else None,
            universal_newlines=True,
            errors="replace",
            timeout=timeout_s,
            env=dict(environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
