"""Settings of the weights' way to the engines that contradict or need each other. Pure.

In: a ``Config``. Out: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.config.wording import spelled


def sync_problems(config: Config) -> list[str]:
    """Of the table [sync]."""
    sync, is_delta = config.sync, config.sync.update_weight_mode == "delta"
    is_local = sync.update_weight_local_checkpoint_dir is not None
    mode, local = spelled(config, "update_weight_mode"), spelled(config, "update_weight_local_checkpoint_dir")
    rules = [
        (
            is_delta and config.cluster.colocate,
            f"{mode} with --colocate true: engines read the trainer's memory and nothing is sent; use "
            "--update-weight-mode full",
        ),
        (
            is_delta and sync.update_weight_transport != "disk",
            f"{mode} with {spelled(config, 'update_weight_transport')}: SGLang takes a change through files alone; use "
            "--update-weight-transport disk, or --update-weight-mode full",
        ),
        (
            is_local and not is_delta,
            f"{local} is not used with {mode}; use --update-weight-mode delta with --update-weight-transport disk, or "
            "--update-weight-local-checkpoint-dir none",
        ),
        (
            is_local and bool(config.sglang.rollout_external_engine_addrs),
            f"{local} with {spelled(config, 'rollout_external_engine_addrs')}: on the hosts of those engines this run "
            "has no process that could write it; use --update-weight-local-checkpoint-dir none, and a "
            "--update-weight-disk-dir that they see",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]
