"""The jobs of a fleet's engines: their settings, and their submission.

Input: the settings of a run, a group of engines. Output: the array of its engine jobs, submitted by
``rlpost fleet`` or, for ``[fleet]`` and ``fleet = true`` of a recipe, by ``rlpost submit``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from common.fleet_name import GROUP, POLICY, fleet_name, group_of
from common.run_folder import RunFolder
from rlpost.cli.job import code_of, job_spec
from rlpost.cli.runs import newest_job, settle
from rlpost.config.engine_groups import group_config
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.keys import without_keys
from rlpost.config.load import absolute_paths
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled
from rlpost.errors import ConfigError, suggestion
from rlpost.extensions.fleet.fleet_checks import (
    engine_size_problem,
    fleet_groups,
    quantised_problem,
)
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_table import FleetConfig
from rlpost.extensions.fleet.fleet_view import EngineView, views
from rlpost.models.config_file import read_config
from slurm.arrays import FleetSpec, engine_tasks
from slurm.errors import UnknownJobError
from slurm.job_id import cluster_of, number_of
from slurm.queue import queue
from slurm.sbatch_options import words_of_engines
from slurm.submissions import explain

PLACES = [
    name for name in ClusterConfig.model_fields if f"engine_{name}" in FleetConfig.model_fields
]
"""Settings of [cluster] that engine jobs may override; [fleet] has them as engine_X."""


def engine_settings(config: Config, changed: Mapping[str, object] | None = None) -> Config:
    """Return the settings with those of the engine jobs in [cluster].

    ``changed`` takes precedence over [fleet], and [fleet] over the run's own settings.

    Raises ConfigError, also where the run requests its GPUs in a way that says nothing of engines.
    """
    overrides = {name: getattr(config.table(FleetConfig), f"engine_{name}") for name in PLACES}
    cluster = {name: value for name, value in overrides.items() if value is not None}
    cluster |= changed or {}
    if config.cluster.sbatch and "sbatch" not in cluster:
        cluster["sbatch"] = _inherited_words(config)
    if not cluster:
        return config
    merged = config.model_dump(mode="json")
    merged["cluster"] |= cluster
    try:
        return absolute_paths(Config.model_validate(merged), Path.cwd())
    except ValueError as error:
        raise ConfigError(f"[cluster] of the engine jobs: {error}") from None


def _inherited_words(config: Config) -> list[str]:
    """Return the options of sbatch that the engine jobs have from the run. Raises ConfigError."""
    run = config.cluster
    words, has_request = words_of_engines(run.sbatch, run.gpu_request)
    if has_request and run.gpu_request == "none":
        raise ConfigError(
            f"{spelled(config, 'sbatch')}: requests the GPUs of the run's own job, and the engines on other jobs need "
            "their own request; use --engine-sbatch (rlpost fleet --sbatch), for instance "
            f"--engine-sbatch=--gres=gpu:{config.cluster.rollout_num_gpus_per_engine}"
        )
    return words


def check_group(config: Config, group: str) -> None:
    """Raise ConfigError if engines of a fleet do not join a group."""
    known = fleet_groups(config)
    if group in known:
        return
    if group in config.engines.groups:
        raise ConfigError(
            f"--group {group}: [engines.{group}] has no engines on other jobs; add fleet = true to it"
        )
    raise ConfigError(
        f"--group {group}: no such group of engines{suggestion(group, known)}; engines of a fleet join "
        f"{listed(known, 'and')}"
    )


def check_model(config: Config, group: str, asked: str) -> None:
    """Raise ConfigError if a fleet cannot serve the model; ``asked``: the flag that asks for it."""
    if group != POLICY and not config.engines.groups[group].follows_policy:
        return
    try:
        problem = quantised_problem(read_config(config.checkpoint.hf_checkpoint))
    except (OSError, ValueError):  # the run's nodes have config.json, this host may not
        return
    if problem is not None:
        raise ConfigError(f"{asked}: {problem}")


def fleet_spec(
    run: RunFolder,
    config: Config,
    number: int,
    *,
    group: str = POLICY,
    after: str | None = None,
) -> FleetSpec:
    """Return the array of ``number`` engine jobs of a run; ``after``: the job that starts first.

    Raises:
        ConfigError, SpecError: a setting is invalid for an engine job; the message names its flag.
    """
    settings, cluster = group_config(config, group), config.cluster
    num_gpus = settings.cluster.rollout_num_gpus_per_engine
    if (problem := engine_size_problem(settings)) is not None:
        raise ConfigError(problem)
    base = job_spec(config)
    folder = fleet_name(group)
    log = str(run.root).replace("%", "%%") + f"/{folder}/logs/%A_%a.batch"
    named = () if group == POLICY else (GROUP, group)
    job = replace(
        base.with_python(sys.executable),
        job_name=f"{cluster.job_name}-{folder}",
        nodes=1,
        spare_nodes=0,
        segment=None,
        num_gpus_per_node=num_gpus,
        exclusive=cluster.exclusive and num_gpus == cluster.num_gpus_per_node,
        requeue="requeue" if cluster.requeue == "requeue" else "never",
        agent_args=("--num-gpus", str(num_gpus), *named),
        driver_args=(),
        home=str(code_of(run)),
        run_folder=str(run.root),
        output=log,
    )
    return FleetSpec(job, number, None if after is None else number_of(after))


def submit_engines(spec: FleetSpec, run: RunFolder) -> str:
    """Submit engine jobs and record them in the ledger; return the id of the array.

    Raises SlurmError, also while the outcome of an earlier submission of engines is unknown.
    """
    for unknown in settle(run, gives_up=True):
        if unknown.outcome == "fleet":
            raise UnknownJobError(explain(unknown))
    folder = FleetFolder(run.root, group_of(spec.job.agent_args))
    folder.create()
    folder.order(stop=False)
    cluster = cluster_of(newest_job(run) or "")
    from slurm.executor import submit_fleet  # loads submitit

    return submit_fleet(spec, run, without_keys(os.environ), cluster=cluster)


def fleet_folders(run: RunFolder) -> list[FleetFolder]:
    """Return the fleets of a run that exist, the policy's first."""
    prefix = fleet_name("")
    names = sorted(path.name.removeprefix(prefix) for path in run.root.glob(f"{prefix}*"))
    folders = [FleetFolder(run.root, group) for group in (POLICY, *names)]
    return [folder for folder in folders if folder.exists()]


def fleet_views(run: RunFolder, group: str = POLICY) -> list[EngineView]:
    """Return a view of each engine: one query to Slurm, and the files of the fleet."""
    settle(run)
    folder = FleetFolder(run.root, group)
    jobs = queue(engine_tasks(run.ledger.read(), group))
    return views(jobs, folder.engines(), folder.lease(), folder.orders(), run.ledger.read())
