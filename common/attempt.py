"""Names of the files of an attempt. Python 3.6 and later, because batch hosts use them.

An attempt is one start of a job in ``RUN/attempts/K``, where K is one more than the highest number
that exists.

    STOP           stop request, see ``common.stop_file``
    secret         created by the batch script (or by a single local agent), mode 0600;
                   authenticates agents, Ray and engines
    verdict        one word for the batch script: done | requeue | failed | config
    verdict.json   the verdict with its cause, for the user
    exclude        hosts to exclude from the next start, one per line; only if there are any
    preflight.json checks of every host and their results
    end_time       end of the job in seconds since 1970, kept current by the batch host
    launch.log     output of srun, preceded by that of the image import
    cause          why the driver failed, in one line, written by the driver; only if a training
                   call hangs
    hang.txt       stacks of all ranks, written when a training call hangs
    lost_nodes.json, replaceable    see ``common.lost_nodes``; only with spare nodes
    agent-HOST.log, driver.log
"""

import os
import secrets
from pathlib import Path
from typing import Mapping

DRIVER_RESTARTS = 3
"""Default maximum number of restarts of a crashed driver in an attempt."""
BRINGUP_DEADLINE_S = 600
"""Default time in seconds until all nodes have joined and all engines answer."""
SIGNAL_LEAD_S = 120
"""Default time in seconds between the signal to save and the end of the job."""
STOP_FILE = "STOP"
SECRET_FILE = "secret"
SECRET_VARIABLE = "RAY_AUTH_TOKEN_PATH"
"""Environment variable with the path of that file, for Ray and for the ranks in its workers."""
VERDICT_FILE = "verdict"
VERDICT_JSON = "verdict.json"
EXCLUDE_FILE = "exclude"
CAUSE_FILE = "cause"
LOST_NODES_FILE = "lost_nodes.json"
REPLACEABLE_FILE = "replaceable"
PREFLIGHT_JSON = "preflight.json"
DRIVER_LOG = "driver.log"
END_TIME_FILE = "end_time"
NO_END = "none"
"""Content of END_TIME_FILE for a job without a time limit; otherwise seconds since 1970."""
LAUNCH_LOG = "launch.log"
CONTAINER_PREFIX = "container_prefix"
"""Words before each command in the agents' container, JSON; with ``--container command`` alone."""


def create_attempt(attempts: Path) -> Path:
    """Create the folder (0700) of the next attempt; link ``latest`` to it.

    Slurm's count of restarts is not its number: a new job of the run begins with 0, and sbatch
    passes on the count of a job in which it is called. Raises OSError.
    """
    attempts.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1 + max((int(name) for name in os.listdir(attempts) if name.isdecimal()), default=-1)
    while True:
        folder = attempts / str(number)
        try:
            folder.mkdir(mode=0o700)
            break
        except FileExistsError:
            number += 1
    link = attempts / f".latest.{secrets.token_hex(4)}"
    link.symlink_to(str(number))
    os.replace(str(link), str(attempts / "latest"))
    return folder


def attempt_secret() -> str:
    """Return the secret of the attempt that this process belongs to; empty outside of one.

    Raises OSError when its file cannot be read.
    """
    path = os.environ.get(SECRET_VARIABLE)
    return Path(path).read_text().strip() if path else ""


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
