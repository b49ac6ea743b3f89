"""The sandbox servers of a run: an array of jobs on CPU nodes, submitted with the run.

Input: the run folder and its settings. Output: a specification, and the id of the array.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from common.run_folder import RunFolder
from rlpost.config.extensions import JobPart
from rlpost.config.keys import without_keys
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.extensions.agents.checks import uses_sandboxes
from rlpost.extensions.agents.sandbox_table import SandboxConfig
from slurm.arrays import SandboxSpec
from slurm.job_id import cluster_of, number_of
from slurm.sbatch_options import words_of_sandboxes

SERVER = "rlpost.extensions.agents.sandbox.server"
SPARE_MIB = 2048  # of a server, besides its sandboxes


def wants_servers(config: Config) -> bool:
    """Return whether the run has sandboxes on other nodes."""
    return config.table(SandboxConfig).sandbox_backend == "slurm"


def sandbox_spec(run: RunFolder, config: Config, after: str | None = None) -> SandboxSpec:
    """Return the array of servers of a run. Raises SpecError for a value that Slurm cannot take."""
    # here: jobs are rendered where only pydantic is installed
    from rlpost.cli.job import code_of, job_spec

    sandbox, cluster = config.table(SandboxConfig), config.cluster
    base = job_spec(config)
    constraint = sandbox.sandbox_constraint
    if constraint is None and sandbox.sandbox_partition is None:
        constraint = cluster.constraint  # features of GPU nodes say nothing of another partition
    each_mib = sandbox.sandbox_memory_mib + sandbox.sandbox_disk_mib
    job = replace(
        replace(base, container=None).with_python(sys.executable),
        job_name=f"{cluster.job_name}-sandboxes",
        nodes=1,
        spare_nodes=0,
        segment=None,
        gpu_request="none",
        gpu_type=None,
        exclusive=False,
        sbatch=tuple(words_of_sandboxes(base.sbatch)),
        partition=sandbox.sandbox_partition or cluster.partition,
        constraint=constraint,
        time=sandbox.sandbox_time,
        requeue="requeue" if cluster.requeue == "requeue" else "never",
        environment=(),
        setup_commands=(),
        agent_args=(),
        driver_args=(),
        home=str(code_of(run)),
        run_folder=str(run.root),
        output=str(run.root).replace("%", "%%") + "/sandboxes/%A_%a.batch",
    )
    return SandboxSpec(
        job,
        sandbox.sandbox_servers,
        module=SERVER,
        places=sandbox.sandbox_places,
        warm=sandbox.sandbox_warm,
        cores=sandbox.sandbox_places * sandbox.sandbox_cores,
        memory_mib=sandbox.sandbox_places * each_mib + SPARE_MIB,
        image=sandbox.sandbox_image,
        read_only=sandbox.sandbox_read_only,
        after=after,
    )


class SandboxJobs(JobPart):
    """See ``rlpost.config.extensions.JobPart``."""

    def agent_args(self, config: Config) -> list[str]:
        """Return --sandboxes, with which agents check that their nodes can start sandboxes."""
        if not uses_sandboxes(config) or wants_servers(config):
            return []
        return ["--sandboxes"]  # any node may become that of the driver

    def problems(self, config: Config, why: str) -> list[str]:
        """Refuse servers on other nodes, which are jobs of Slurm."""
        if not wants_servers(config):
            return []
        return [f"{spelled(config, 'sandbox_backend')}: {why}; use --sandbox-backend node"]

    def check(self, config: Config, run: RunFolder) -> None:
        """See ``sandbox_spec``."""
        if wants_servers(config):
            sandbox_spec(run, config)

    def submit(self, config: Config, run: RunFolder, job_id: str) -> str | None:
        """Submit the servers of a submitted run; they start after it."""
        if not wants_servers(config):
            return None
        spec = sandbox_spec(run, config, number_of(job_id))
        environ = without_keys(os.environ)
        from slurm.executor import submit_sandboxes  # loads submitit

        array = submit_sandboxes(spec, run, environ, cluster=cluster_of(job_id))
        return f"sandbox servers {array}"


SANDBOX_JOBS = SandboxJobs()
