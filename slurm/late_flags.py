"""Flags of [cluster] that have no effect after a batch file's name, and what to use instead.

These settings are part of the text of a batch file when it is rendered; after its name
(``sbatch jobs/x.sbatch --nodes 4``) they would change nothing. Python 3.6.
"""

from typing import Dict, List, Sequence

from slurm.sbatch_options import OF_SETTINGS

BY_SBATCH = tuple(option.key for option in OF_SETTINGS)
"""sbatch has an option of the same name and meaning, which goes before the file."""

BY_VARIABLE = {
    "assets_dir": "RLPOST_ASSETS",
    "container": "RLPOST_CONTAINER",
    "container_image": "RLPOST_IMAGE",
    "image_cache": "RLPOST_IMAGE_CACHE",
    "python": "RLPOST_PYTHON",
    "runs_dir": "RLPOST_RUN_FOLDER",
}
"""Read from the environment by the job."""

BY_RENDERING = (
    "bringup_deadline_s",
    "container_command",
    "container_mounts",
    "environment",
    "exclusive",
    "gpu_request",
    "gpu_type",
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
    "sbatch",
    "setup_commands",
    "signal_lead_s",
    "socket_ifname",
    "spare_nodes",
)
"""Only another batch file has another value."""

OTHER = {"run_folder": "RLPOST_RUN_FOLDER", "resume": "RLPOST_RUN_FOLDER"}
"""No settings: which run a job works on. A folder that holds a run is resumed; the tasks of an array
never share one."""


def late_flags(words: Sequence[str]) -> List[str]:
    """A line for each flag among the words that comes too late, with its remedy.

    >>> late_flags(["--num-rollout", "3", "--qos=low"])[0].partition("; ")[2]
    'use sbatch --qos=low FILE'
    """
    remedies, problems = _remedies(), []
    for position, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag not in remedies:
            continue
        following = words[position + 1] if position + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        shown = f"{flag} {value}" if value else flag
        remedy = remedies[flag].format(flag=flag, value=value or "VALUE")
        problems.append(
            f"{shown}: decided when the batch file is rendered, no effect after its name; "
            f"use {remedy}"
        )
    return problems


def _remedies() -> Dict[str, str]:
    """What to use in place of each flag."""
    rendering = "rlpost submit, or site.toml in jobs/clusters and make jobs"
    remedies = {key: "sbatch {flag}={value} FILE" for key in BY_SBATCH}
    for key, variable in {**BY_VARIABLE, **OTHER}.items():
        remedies[key] = f"export {variable}=..."
    for key in (*BY_RENDERING, "cluster"):
        remedies[key] = rendering
    return {"--" + key.replace("_", "-"): remedy for key, remedy in remedies.items()}
