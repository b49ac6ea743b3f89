"""Limits and pools of sandboxes, by the table [sandbox] of a recipe.

Input: the settings, and the run's folder for sandboxes on other nodes. Output: limits, a pool, and
a check of this node.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlpost.config.tree import Config
from rlpost.extensions.agents.checks import uses_sandboxes
from rlpost.extensions.agents.sandbox.local import Root
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits, Pool
from rlpost.extensions.agents.sandbox.remote import RemotePool
from rlpost.extensions.agents.sandbox_table import SandboxConfig


def limits_of(settings: SandboxConfig) -> Limits:
    """Return the limits of one sandbox."""
    return Limits(
        wall_seconds=settings.sandbox_wall_seconds,
        cpu_seconds=settings.sandbox_cpu_seconds,
        cores=settings.sandbox_cores,
        memory_mib=settings.sandbox_memory_mib,
        disk_mib=settings.sandbox_disk_mib,
        processes=settings.sandbox_processes,
        network=settings.sandbox_network,
    )


def pool_of(settings: SandboxConfig, run_folder: Path) -> Pool:
    """Return the pool of a run; ``async with`` opens it.

    Entering it raises ConfigError when this node cannot run sandboxes. With ``slurm``, callers wait
    until the first server has registered.
    """
    if settings.sandbox_backend == "slurm":
        return RemotePool(run_folder, limits_of(settings))
    return LocalPool(
        limits_of(settings),
        size=settings.sandbox_places,
        warm=settings.sandbox_warm,
        root=_root_of(settings),
    )


def check_node(config: Config) -> None:
    """Start one sandbox with the run's image and limits, if the run will start some on this node.

    Raises:
        ConfigError: this node cannot run it. The run would fail at its first episode, after the
            engines and the trainer have started.
    """
    settings = config.table(SandboxConfig)
    if settings.sandbox_backend != "node" or not uses_sandboxes(config):
        return

    async def attempt() -> None:
        async with LocalPool(limits_of(settings), size=1, warm=0, root=_root_of(settings)):
            pass

    asyncio.run(attempt())


def _root_of(settings: SandboxConfig) -> Root:
    return Root(settings.sandbox_image, settings.sandbox_read_only)
