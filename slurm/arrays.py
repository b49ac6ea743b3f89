"""Arrays of independent tasks that belong to a run: engines of a fleet, sandbox servers.

Input: a ``JobSpec`` of one task and the sizes. Output: specs that ``render`` can insert into a
batch file verbatim.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.fleet_name import POLICY
from common.ledger import Entry
from slurm.errors import SpecError
from slurm.job_id import cluster_of, number_of, on_cluster
from slurm.spec import JobSpec

MAX_TASKS = 1000  # MaxArraySize is 1001 by default (man slurm.conf)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """An array of engine jobs.

    Attributes:
        job: one engine's job; ``run_folder``, ``home`` and ``python`` are set. ``agent_args`` are
            those of ``rlpost.engines.engine_job``.
        num_engines: tasks of the array.
        after: id of the job after whose start they may start; None for at once.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    job: JobSpec
    num_engines: int
    after: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_engines <= MAX_TASKS:
            raise SpecError(
                f"engines: {self.num_engines}; use 1 to {MAX_TASKS}, and call again for more"
            )
        if self.job.nodes != 1 or self.job.spare_nodes:
            raise SpecError(
                f"nodes: {self.job.nodes} and {self.job.spare_nodes} spare; an engine of a fleet has "
                "one node; use --rollout-num-gpus-per-engine of at most --num-gpus-per-node"
            )
        if not (self.job.run_folder and self.job.home):
            raise SpecError("run_folder, home: a fleet belongs to a run that exists")
        if self.job.requeue == "chain":
            raise SpecError("requeue: 'chain' is for the run itself; an engine restarts by requeue")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """An array of sandbox servers.

    Attributes:
        job: one server's job; ``run_folder``, ``home`` and ``python`` are set.
        num_servers: tasks of the array.
        places: sandboxes of one server at a time.
        module: the Python module of the server.
        warm: sandboxes that a server prepares in advance.
        cores: CPUs of one server.
        memory_mib: memory of one server, for all places; 0: the partition's default.
        image: folder or .sqsh file; None: the node's own /usr.
        read_only: further folders that commands may read.
        after: job id of the run; servers start when it has started.

    Raises:
        SpecError: names the field, its value and the allowed values.
    """

    job: JobSpec
    num_servers: int
    places: int
    module: str
    warm: int = 1
    cores: int = 1
    memory_mib: int = 0
    image: str | None = None
    read_only: tuple[str, ...] = ()
    after: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_servers <= MAX_TASKS:
            raise SpecError(f"num_servers: {self.num_servers}; use 1 to {MAX_TASKS}")
        for name in ("places", "cores"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}: {getattr(self, name)}; use 1 or more")
        if self.warm < 0 or self.memory_mib < 0:
            raise SpecError(f"warm, memory_mib: {self.warm}, {self.memory_mib}; use 0 or more")
        if self.job.nodes != 1 or self.job.spare_nodes or self.job.gpu_request != "none":
            raise SpecError("nodes, gpu_request: a sandbox server has one node and no GPU")
        if self.job.container is not None:
            raise SpecError("container: a sandbox server runs on the node; its image is `image`")
        if not (self.job.run_folder and self.job.home and self.job.python):
            raise SpecError("run_folder, home, python: sandbox servers belong to a run")
        if self.job.requeue == "chain":
            raise SpecError("requeue: 'chain' is for the run itself; a server restarts by requeue")
        for path in (self.image or "", *self.read_only):
            if not path.isprintable():
                raise SpecError(f"image, read_only: {path!r} contains a control character")
        if self.after is not None and not self.after.isdecimal():
            raise SpecError(f"after: {self.after!r} is not the number of a job")


def engine_tasks(ledger: Sequence[Entry], group: str | None = None) -> list[str]:
    """Return the ids of all engine jobs that were submitted for a run, or for one of its groups."""
    return [
        task_name(str(entry["array"]), task)
        for entry in ledger
        if entry.get("event") == "fleet" and "array" in entry and "engines" in entry
        if group is None or entry.get("group", POLICY) == group
        for task in range(int(entry["engines"]))
    ]


def task_name(job_id: str, task: int) -> str:
    """Return the id of a task, which is also its name; ``job_id``: of the array."""
    return on_cluster(f"{number_of(job_id)}_{task}", cluster_of(job_id))


def job_and_task(name: str) -> tuple[str, int] | None:
    """Return the job and the number of a task's name; None if it is not one of an array."""
    match = re.fullmatch(r"(\d+)_(\d+)", name, re.ASCII)
    return (match[1], int(match[2])) if match else None
