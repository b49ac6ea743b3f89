"""slurm/cluster_flags.sh: refuses flags of [cluster] that have no effect after a batch file's name.

Input: the settings below, which are in the text of a batch script when it is rendered; after its name
(``sbatch jobs/x.sbatch --nodes 4``) they would change nothing. Output: a script with the remedy for
each, because a login node may have no Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.config.flags import flag

BY_SBATCH = (
    "account",
    "constraint",
    "exclude",
    "job_name",
    "partition",
    "qos",
    "reservation",
    "time",
)
"""sbatch has an option of the same name and meaning, which goes before the file."""

BY_VARIABLE = {
    "assets_dir": "RLPOST_ASSETS",
    "container": "RLPOST_CONTAINER",
    "container_image": "RLPOST_IMAGE",
    "image_cache": "RLPOST_IMAGE_CACHE",
    "python": "RLPOST_PYTHON",
    "runs_dir": "RLPOST_RUN_FOLDER",
}
"""Read from the environment by the script."""

BY_RENDERING = (
    "bringup_deadline_s",
    "container_mounts",
    "environment",
    "exclusive",
    "gpu_request",
    "max_driver_restarts",
    "max_failures",
    "max_preemptions",
    "max_stalled_attempts",
    "nodes",
    "num_gpus_per_node",
    "preflight_bandwidth_gbps",
    "ray_dashboard",
    "ray_dashboard_host",
    "ray_object_store_memory",
    "requeue",
    "setup_commands",
    "signal_lead_s",
    "socket_ifname",
    "spare_nodes",
)
"""Only another script has another value."""

OTHER = {"run_folder": "RLPOST_RUN_FOLDER"}
"""No setting, but a flag of the training that the script gives itself."""

_TEXT = """\
#!/bin/bash
# Refuse flags that come too late: cluster_flags.sh WORD...   Exit 78 with one line for each, and its remedy.
# Written by tools/make_jobs.py from tools/late_flags.py, which says why they are too late.
code=0
while [ $# -gt 0 ]; do
  flag=${1%%=*} value='' remedy=''
  case $1 in *=*) value=${1#*=} ;; *) [[ ${2:---} == --* ]] || value=$2 ;; esac
  case $flag in
@CASES@
  esac
  if [ "$remedy" ]; then
    echo "$flag${value:+ $value}: decided when the batch file is rendered, no effect after its name; use $remedy" >&2
    code=78
  fi
  shift
done
exit "$code"
"""


def refusing_script() -> str:
    """The text of ``slurm/cluster_flags.sh``."""
    cases = [_case(BY_SBATCH, "sbatch $flag=${value:-VALUE} FILE")]
    cases += [
        _case((key,), f"export {name}=...")
        for key, name in sorted({**BY_VARIABLE, **OTHER}.items())
    ]
    cases.append(
        _case(
            (*BY_RENDERING, "cluster"), "rlpost submit, or site.toml in jobs/clusters and make jobs"
        )
    )
    return _TEXT.replace("@CASES@", "\n".join(cases))


def _case(keys: Sequence[str], remedy: str) -> str:
    flags = [flag(key) for key in sorted(keys)]
    lines = " | \\\n".join(
        "      " + " | ".join(flags[start : start + 4]) for start in range(0, len(flags), 4)
    )
    return f'    {lines.lstrip()})\n      remedy="{remedy}" ;;'
