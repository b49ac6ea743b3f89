"""Which environment variables reach Slurm's commands, a job's steps, and rlpost. Pure, except for
``login_variables``. Python 3.6.

Slurm's commands read options from variables, and the shell that submits a job may itself run in
another job, which sets them. Both functions therefore keep a few of Slurm's variables and drop all
others, known or not: new versions add some (SLURM_TRES_PER_TASK in 23.11).

Sources: INPUT and OUTPUT ENVIRONMENT VARIABLES in the manual pages of sbatch, srun, salloc,
scancel, squeue, scontrol, sinfo and sacct.
"""

import difflib
import os
import pwd
import re
from typing import Dict, List, Mapping, Set

from slurm.sbatch_options import OF_SETTINGS

OF_SLURM = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SCANCEL_",
    "SQUEUE_",
    "SCONTROL_",
    "SINFO_",
    "SACCT_",
    "SUBMITIT_",
    "SPANK_",
    "_SLURM_SPANK_OPTION_",
)
"""Beginnings of the variables of Slurm, of its plugins' options, and of submitit."""

TO_REACH_SLURM = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""Configuration, cluster and credential of the commands."""

WITH_A_SETTING = {
    f"SBATCH_{option.key.upper()}": option.name for option in OF_SETTINGS if option.has_variable
}
CHOSEN_BY_THE_USER = {
    **WITH_A_SETTING,
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_WCKEY": "wckey",
    "SBATCH_EXPORT": "export",
    "SBATCH_GET_USER_ENV": "get-user-env",
}
"""Where a job runs, for whom, and with whose environment; all else is the batch file's to say.

The value is the option of sbatch, which wins over its variable.
"""

OF_THIS_JOB = {
    "SLURM_CLUSTER_NAME",
    "SLURM_CONF",
    "SLURM_CPUS_ON_NODE",
    "SLURM_GTIDS",
    "SLURM_JOBID",
    "SLURM_LOCALID",
    "SLURM_NNODES",
    "SLURM_NODEID",
    "SLURM_NODELIST",
    "SLURM_NODE_ALIASES",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST",
    "SLURM_TASKS_PER_NODE",
    "SLURM_TASK_PID",
    "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN",
    "SLURMD_NODENAME",
}
"""Set by Slurm for a job, so that values of another job are replaced.

Not SLURM_UMASK: srun sets it to the umask of its caller unless it exists (slurm,
src/srun/libsrun/srun_job.c, _set_umask_env); one of the submitting shell would win over the 077 of
the batch host.
"""

OF_EVERY_JOB = re.compile("SLURM_(JOB|ARRAY)_[A-Z_]+")

OF_PLUGINS = re.compile("_SLURM_SPANK_OPTION_(?!pyxis_).*")
"""Options of site plugins that sbatch got, and srun reads (man spank). pyxis's are those of an outer
job: a job states its container itself."""

OF_A_CHAIN = (*WITH_A_SETTING, "SBATCH_WCKEY")
"""The next job of a chain runs on this cluster and gets variables, so not all CHOSEN_BY_THE_USER."""

OURS = {
    "RLPOST_HOME": "folder of rlpost; default: the folder of sbatch",
    "RLPOST_RUN_FOLDER": "default: $RLPOST_HOME/runs/{name}-JOBID",
    "RLPOST_ASSETS": "folder of models and data",
    "RLPOST_IMAGE": "the container: FILE.sqsh or a name in a registry",
    "RLPOST_IMAGE_CACHE": "folder of imported images; default: $RLPOST_HOME/runs/images",
    "RLPOST_CONTAINER": "pyxis, enroot or none; default: what the cluster has",
    "RLPOST_PYTHON": "default: python3 in a container, else $RLPOST_HOME/.venv/bin/python",
}
"""Variables that a user may set before a batch file runs, with their meaning."""

OTHERS_OF_OURS = {
    "RLPOST_CHAT_TEMPLATES",
    "RLPOST_CONVERSATIONS",
    "RLPOST_GPU_TESTS_ON",
    "RLPOST_RANKS_DEADLINE_S",
    "RLPOST_JOB_ID",
    "RLPOST_LOG_FORMAT",
    "RLPOST_MODEL_MODULE",
    "RLPOST_NO_KEY",
    "RLPOST_RESTART_COUNT",
    "RLPOST_RUNS_DIR",
    "RLPOST_SGLANG",
    "RLPOST_TORCH",
    "RLPOST_DEEP_EP",
    "RLPOST_GPU_PACKAGES",
    "RLPOST_PROGRESS_S",
    "RLPOST_UMASK",
    "RLPOST_WATCH_S",
}
"""Variables that other parts of rlpost read or set."""


def submission_environment(environ: Mapping[str, str], script: str = "") -> Dict[str, str]:
    """The environment of a command of Slurm that this process starts.

    Args:
        script: text of the batch file for sbatch. A variable of an option that the file states is
            dropped, because it would win, and may be a general default of the user.
    """
    directives = "".join(re.findall(r"(?m)^#SBATCH .*$", script))
    stated = set(re.findall(r"(?<= --)[a-z-]+", directives))
    kept = {name for name, option in CHOSEN_BY_THE_USER.items() if option not in stated}
    return _keep(environ, TO_REACH_SLURM | kept)


def job_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of a job's steps: what Slurm set for this job, nothing that srun reads.

    A credential (SLURM_JWT) that sbatch brought along is dropped too.
    """
    in_job = {name for name in environ if OF_EVERY_JOB.fullmatch(name)}
    in_job |= {name for name in environ if OF_PLUGINS.fullmatch(name)}
    return _keep(environ, OF_THIS_JOB | in_job)


def chosen_for_a_chain(environ: Mapping[str, str]) -> Dict[str, str]:
    """Variables with which the next job of a chain gets the account and place of this one.

    ``environ``: of the job. Options on the command line of sbatch are known to Slurm alone, which
    reports account and partition.
    """
    chosen = {name: environ[name] for name in OF_A_CHAIN if environ.get(name)}
    for option in ("ACCOUNT", "PARTITION"):
        value = environ.get(f"SLURM_JOB_{option}", "")
        if value and value != "(null)":
            chosen.setdefault(f"SBATCH_{option}", value)
    return chosen


def without_array(environ: Mapping[str, str]) -> Dict[str, str]:
    """Drop the variables of an array, in which only the submitting shell ran."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_ARRAY_")}


def login_variables() -> Dict[str, str]:
    """Variables of a login that container runtimes need (ch-run: USER) and that a job may lack."""
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:  # a user whom this host does not know
        return {}
    return {"USER": user.pw_name, "HOME": user.pw_dir}


def unknown_variables(environ: Mapping[str, str]) -> List[str]:
    """A line for each variable RLPOST_* that nothing reads, with the nearest known one.

    >>> unknown_variables({"RLPOST_ASSET": "/data"})
    ['RLPOST_ASSET: no such variable; did you mean RLPOST_ASSETS?']
    """
    known = sorted({*OURS, *OTHERS_OF_OURS})
    lines = []
    for name in sorted(environ):
        if not name.startswith("RLPOST_") or name in known:
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(OURS)}"
        lines.append(f"{name}: no such variable; {remedy}")
    return lines


def _keep(environ: Mapping[str, str], names: Set[str]) -> Dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in names or not name.startswith(OF_SLURM)
    }
