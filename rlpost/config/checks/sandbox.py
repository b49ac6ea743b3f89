"""Check the table [sandbox] for settings that cannot work. Pure, except for the image's path.

Input: a ``Config``. Output: one line for each problem.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.config.tree import Config
from rlpost.config.wording import spelled


def sandbox_problems(config: Config) -> list[str]:
    """Problems of the table [sandbox]."""
    sandbox = config.sandbox
    warm, image = spelled(config, "sandbox_warm"), spelled(config, "sandbox_image")
    path = Path(sandbox.sandbox_image) if sandbox.sandbox_image is not None else None
    on_node = sandbox.sandbox_backend == "node"
    partition = spelled(config, "sandbox_partition")
    rules = [
        (
            sandbox.sandbox_warm > sandbox.sandbox_places,
            f"{warm} is more than {spelled(config, 'sandbox_places')}: a node has no place for them",
        ),
        (
            path is not None and not path.exists(),
            f"{image}: no such file or folder",
        ),
        (
            path is not None and path.exists() and on_node and not path.is_dir(),
            f"{image} is not a folder; unpack it, or use --sandbox-backend slurm, which does",
        ),
        (
            on_node and sandbox.sandbox_partition is not None,
            f"{partition} is not used with --sandbox-backend node; use --sandbox-backend slurm",
        ),
        (
            sandbox.sandbox_processes < 4,
            f"{spelled(config, 'sandbox_processes')}: a shell and a program need at least 4",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]
