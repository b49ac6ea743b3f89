"""Remove environment variables that would override the options of sbatch and srun. Pure.

Input: the environment of this process, the text of a batch script. Output: an environment for
sbatch or srun.
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
"""Further suffixes of SBATCH_ variables that set an option, beside its name (man sbatch)."""


def outside_any_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables of an enclosing job.

    srun would read them as options, and sbatch would pass them to the srun of the new job.
    Variables that locate the Slurm cluster are kept. Unlike submitit's ``clean_env``, this also
    keeps the user's variables for sbatch (SBATCH_ACCOUNT).
    """
    return {
        name: value
        for name, value in environ.items()
        if name in TO_REACH_SLURM or not name.startswith(("SLURM_", "SRUN_", "SUBMITIT_"))
    }


def for_script(environ: Mapping[str, str], script: str) -> dict[str, str]:
    """Environment of sbatch for this script, without variables of options that the script sets.

    Those variables would override the script, and a user's SBATCH_PARTITION may be a general
    default. Variables of an enclosing job are removed as well.
    """
    stated = re.findall(r"(?<= --)[a-z-]+", "".join(re.findall(r"(?m)^#SBATCH .*$", script)))
    names = {name for option in stated for name in (option, *OTHER_NAMES.get(option, ()))}
    winning = {"SBATCH_" + name.upper().replace("-", "_") for name in names}
    return {name: value for name, value in outside_any_job(environ).items() if name not in winning}
