"""The table [sandbox] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import FilePath, FilePaths, Group, Positive, PositiveNumber

ARCHIVE_MIB, ARCHIVE_FILES = 1024, 100_000


class SandboxConfig(Group):
    """Sandboxes for the commands of agents, and their limits (docs/agents.md)."""

    sandbox_backend: Literal["node", "slurm"] = "node"
    """node: namespaces on the driver's node. slurm: servers on CPU nodes, as a job array of
    --sandbox-servers tasks."""
    sandbox_places: Positive = 8
    """Sandboxes of one node at a time; further episodes wait in order."""
    sandbox_warm: Annotated[int, Field(ge=0)] = 1
    """Sandboxes of one node that are started in advance."""
    sandbox_image: FilePath | None = None
    """Root of the sandboxes: a folder, or with --sandbox-backend slurm a .sqsh file that enroot
    unpacks on each node. Default: /usr of the node, read-only."""
    sandbox_read_only: FilePaths = ()
    """Further folders that commands may read, at the same paths."""
    sandbox_network: bool = False
    """Let commands use the node's network, services on its loopback included."""
    sandbox_wall_seconds: PositiveNumber = 60.0
    """Seconds of one command."""
    sandbox_cpu_seconds: PositiveNumber = 60.0
    """CPU seconds of one command, over all of its processes."""
    sandbox_cores: Positive = 1
    """CPUs of one sandbox."""
    sandbox_memory_mib: Positive = 1024
    """Memory of one sandbox, in MiB, without its files."""
    sandbox_disk_mib: Positive = 512
    """Files that one sandbox writes, in MiB; they occupy memory of the node."""
    sandbox_archive_mib: Positive = ARCHIVE_MIB
    """Files of one saved sandbox, in MiB over all of its folders, those of the image included. A
    verifier of a Harbor task gets no more either."""
    sandbox_archive_files: Positive = ARCHIVE_FILES
    """Files and folders of one saved sandbox, over all of its folders."""
    sandbox_processes: Positive = 128
    """Processes and threads of one sandbox."""
    sandbox_servers: Positive = 1
    """Nodes with sandboxes, with --sandbox-backend slurm."""
    sandbox_partition: str | None = None
    """Slurm partition of the sandbox servers. Default: --partition."""
    sandbox_constraint: str | None = None
    """Node features that the sandbox servers require. Default: --constraint, unless
    --sandbox-partition is given."""
    sandbox_time: str = "1-00:00:00"
    """Time limit of a sandbox server; it is requeued until the run ends."""
