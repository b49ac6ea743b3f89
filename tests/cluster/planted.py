"""Variables that Slurm's commands read, each with a value that would change a job.

Source: the sections (INPUT) ENVIRONMENT VARIABLES of the manual pages that are installed, and for
newer versions those of Slurm 26.05.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from slurm.variables import CHOSEN_BY_THE_USER, TO_REACH_SLURM

COMMANDS = ("sbatch", "srun", "salloc", "scancel", "squeue", "scontrol", "sinfo", "sacct")
PAGES = Path("/usr/share/man/man1")
SINCE_22_05 = (
    *("SBATCH_CONTAINER_ID", "SBATCH_CONTAINER_TYPE", "SBATCH_SEGMENT_SIZE", "SBATCH_TRES_BIND"),
    *("SBATCH_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_JSON", "SLURM_OOMKILLSTEP"),
    *("SLURM_TRES_BIND", "SLURM_TRES_PER_TASK", "SLURM_YAML", "SRUN_CONTAINER_ID"),
    *("SRUN_CONTAINER_TYPE", "SRUN_ERROR", "SRUN_INPUT", "SRUN_OUTPUT", "SRUN_SEGMENT_SIZE"),
    *("SCANCEL_CRON", "SACCT_FORMAT"),
)
OF_AN_OUTER_JOB = ("SLURM_HET_SIZE", "SLURM_WORKING_CLUSTER")
"""Output variables of salloc that the commands in its shell read."""
VALUES = {
    "SCANCEL_INTERACTIVE": "",  # set at all, it asks before it cancels
    "SCANCEL_PARTITION": "nowhere",
    "SCANCEL_STATE": "PENDING",
    "SLURM_DEPENDENCY": "singleton",
    "SLURM_WORKING_CLUSTER": "other:127.0.0.1:9:9728",
}


def documented() -> set[str]:
    """Variables that the installed manual pages list as input."""
    names: set[str] = set()
    for command in COMMANDS:
        page = PAGES / f"{command}.1.gz"
        if page.exists():
            names |= _input_of(gzip.decompress(page.read_bytes()).decode())
    return names


def planted() -> dict[str, str]:
    """All of them except those by which users choose cluster, account, partition and the like."""
    names = documented() | {*SINCE_22_05, *OF_AN_OUTER_JOB, *VALUES}
    names -= TO_REACH_SLURM | CHOSEN_BY_THE_USER.keys()
    return {name: VALUES.get(name, "1") for name in sorted(names)}


def _input_of(page: str) -> set[str]:
    sections = re.split(r'(?m)^\.SH "?', page)
    chosen = [text for text in sections if re.match("(INPUT )?ENVIRONMENT VARIABLES", text)]
    return set(re.findall(r"(?m)^\\fB(S[A-Z]+_[A-Z0-9_]+)\\fR", "".join(chosen)))
