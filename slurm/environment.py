"""Remove environment variables that would override the options of sbatch and srun. Pure.

Input: the environment of this process, the text of a batch script. Output: an environment for sbatch or srun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TO_REACH_SLURM = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
OTHER_NAMES = {
    "time": ("TIMELIMIT",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "requeue": ("NO_REQUEUE",),
    "no-requeue": ("REQUEUE",),
}
"""Of the variables of sbatch (man sbatch), by option; SBATCH_ and the option's own name is one of each."""


def outside_any_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what a job left in whose shell this process runs: srun takes it for options, and sbatch hands it on to
    the srun of the new job. What Slurm is reached by stays, and what a user sets for sbatch (SBATCH_ACCOUNT), other
    than in submitit's ``clean_env``."""
    return {
        name: value
        for name, value in environ.items()
        if name in TO_REACH_SLURM or not name.startswith(("SLURM_", "SRUN_", "SUBMITIT_"))
    }


def for_script(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """For sbatch with this script: outside any job, and without variables for options that the script has. They would
    win, and a user's SBATCH_PARTITION may be a default, not an answer to ``--partition``."""
    stated = re.findall(r"(?<= --)[a-z-]+", "".join(re.findall(r"(?m)^#SBATCH .*$", script)))
    names = {name for option in stated for name in (option, *OTHER_NAMES.get(option, ()))}
    winning = {"SBATCH_" + name.upper().replace("-", "_") for name in names}
    return {name: value for name, value in outside_any_job(environ).items() if name not in winning}
