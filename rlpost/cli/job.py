"""Derive the Slurm job of a run from its settings. Requires only pydantic, as ``make jobs`` does.

Input: a ``Config``. Output: the ``JobSpec`` of its batch script, and the container that a job
submitted on this host would use.
"""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from pathlib import Path

from common.attempt import DRIVER_RESTARTS
from common.files import text_or_empty
from common.jit_caches import is_remote, mount_of
from common.run_folder import RunFolder
from rlpost.config import extensions
from rlpost.config.checks.missing import read_paths
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.keys import KEYS
from rlpost.config.tree import Config
from rlpost.config.wording import as_flag, listed, spelled, with_values
from rlpost.errors import ConfigError
from slurm.container import Container
from slurm.container_choice import choose
from slurm.errors import SpecError
from slurm.spec import JobSpec

PROJECT = Path(__file__).parents[2]
IMAGE = "RLPOST_IMAGE"
IMAGE_CACHE = "RLPOST_IMAGE_CACHE"
SAME_NAME = {field.name for field in fields(JobSpec)} & set(ClusterConfig.model_fields)
"""Settings that the specification of the job takes as they are."""


def time_notes(config: Config) -> list[str]:
    """Note on a time limit that a start may use up; none if the job's settings are invalid."""
    try:
        limit_s = job_spec(config).time_limit_s
    except (ConfigError, SpecError):
        return []  # reported when the job is made
    cluster = config.cluster
    left_s = limit_s - cluster.signal_lead_s
    if left_s >= cluster.bringup_deadline_s:
        return []
    needed_s = cluster.signal_lead_s + cluster.bringup_deadline_s
    return [
        f"{spelled(config, 'time')}: the signal to save comes {left_s} s after the start "
        f"({spelled(config, 'signal_lead_s')}), and the start may take "
        f"{spelled(config, 'bringup_deadline_s')}, so an attempt may end without a step; use --time "
        f"{math.ceil(needed_s / 60) + 1} (minutes) or more, or --bringup-deadline-s {max(1, left_s // 2)}"
    ]


def local_disk_notes(config: Config) -> list[str]:
    """Note on paths of a local disk of this host, where the runs folder is on a network."""
    mounts = text_or_empty(Path("/proc/self/mounts"))
    if not is_remote(mount_of(os.path.abspath(config.cluster.runs_dir), mounts)):
        return []
    local = [path for path in read_paths(config) if not is_remote(mount_of(path, mounts))]
    if not local:
        return []
    return [
        f"{listed(local, 'and')}: on a local disk of this host, unlike {config.cluster.runs_dir}; "
        "nodes need it under the same path, or the job ends with exit code 78"
    ]


def job_spec(
    config: Config, *, driver_args: tuple[str, ...] = (), is_for_any_site: bool = False
) -> JobSpec:
    """Return the job of a run.

    Args:
        driver_args: passed to ``rlpost.train`` after the run folder.
        is_for_any_site: the batch file is submitted elsewhere, so paths of this host mean nothing.

    Raises:
        ConfigError: --environment contains an API key, which would appear in the batch script.
        SpecError: a value is invalid in a batch script; the message names its flag.
    """
    try:
        return _job_spec(config, driver_args, () if is_for_any_site else tuple(read_paths(config)))
    except SpecError as error:
        raise SpecError(as_flag(str(error))) from error


def _job_spec(
    config: Config, driver_args: tuple[str, ...], needed_paths: tuple[str, ...]
) -> JobSpec:
    cluster = config.cluster
    if keys := [name for name in KEYS if name in cluster.environment]:
        raise ConfigError(
            f"--environment {keys[0]}=...: the batch script would contain the key; instead export "
            f"{', '.join(keys)} before rlpost submit, which stores it only in RUN/secrets.env"
        )
    agent_args = ["--bringup-deadline-s", str(cluster.bringup_deadline_s)]
    agent_args += ["--signal-lead-s", str(cluster.signal_lead_s)]
    if cluster.max_driver_restarts != DRIVER_RESTARTS:
        agent_args += ["--driver-restarts", str(cluster.max_driver_restarts)]
    if config.observe.log_format is not None:
        agent_args += ["--log-format", config.observe.log_format]
    if cluster.socket_ifname is not None:
        agent_args += ["--socket-ifname", cluster.socket_ifname]
    if cluster.ray_object_store_memory is not None:
        agent_args += ["--object-store-memory", str(cluster.ray_object_store_memory)]
    if cluster.preflight_bandwidth_gbps is not None:
        agent_args += ["--bandwidth-gbps", str(cluster.preflight_bandwidth_gbps)]
    for part in extensions.job_parts():
        agent_args += part.agent_args(config)
    if cluster.colocate:
        agent_args.append("--share-gpus")
    container = container_of(cluster)
    targets = container.targets if container is not None else ()
    for path in dict.fromkeys((*targets, *needed_paths)):
        agent_args += ["--needed-path", path]
    if cluster.ray_dashboard:
        agent_args += ["--ray-dashboard-host", cluster.ray_dashboard_host]
    values = {name: getattr(cluster, name) for name in SAME_NAME}
    values |= {"nodes": config.num_nodes, "environment": tuple(cluster.environment.items())}
    values |= {"container": container, "agent_args": tuple(agent_args), "driver_args": driver_args}
    return JobSpec(**values)


def code_of(run: RunFolder) -> Path:
    """Return the folder of the code for further jobs of a run: its snapshot, else this project."""
    return run.code if run.code.is_dir() else PROJECT


def container_of(cluster: ClusterConfig) -> Container | None:
    """Return the container of a run's agents, or None; the job resolves the backend ``auto``.

    Raises:
        SpecError: the settings of the container are invalid.
    """
    if cluster.container == "none":
        return None
    image = cluster.container_image or (f"${IMAGE}" if cluster.container == "auto" else "")
    cache = (
        cluster.image_cache or os.environ.get(IMAGE_CACHE) or str(Path(cluster.runs_dir) / "images")
    )
    command = cluster.container_command if cluster.container == "command" else ""
    return Container(cluster.container, image, cluster.container_mounts, cache, command)


def container_of_attempt(cluster: ClusterConfig, attempt: Path) -> Container | None:
    """Return the container of an attempt; the batch script records what ``auto`` resolved to."""
    container = container_of(cluster)
    if container is None or container.backend != "auto":
        return container
    backend = (attempt / "container").read_text().strip()
    return None if backend == "none" else replace(container, backend=backend)  # type: ignore[arg-type]


def as_the_job_would(config: Config) -> tuple[Config, str]:
    """Return the settings with the container that a job on this host would use, and the reason.

    For checks only.

    Raises:
        ConfigError: the container backend or its image is missing here; the message has the remedy.
    """
    backend = config.cluster.container
    if backend not in ("auto", "pyxis"):  # enroot may be installed on the nodes only
        return config, ""
    image = config.cluster.container_image or os.environ.get(IMAGE, "")
    try:
        chosen, why = choose(backend, "" if image.startswith("$") else image)
    except SpecError as error:
        raise ConfigError(str(error)) from None
    return with_values(config, container=chosen), why
