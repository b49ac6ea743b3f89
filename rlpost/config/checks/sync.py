"""Settings of the weights' way to the engines that contradict or need each other. Pure.

In: a ``Config``. Out: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config


def sync_problems(config: Config) -> list[str]:
    """Of the table [sync]."""
    sync, is_delta = config.sync, config.sync.update_weight_mode == "delta"
    local = sync.update_weight_local_checkpoint_dir
    mode = f"update_weight_mode = {sync.update_weight_mode}"
    rules = [
        (
            is_delta and sync.update_weight_transport != "disk",
            f"{mode}: SGLang takes a change through files alone; set update_weight_transport = disk",
        ),
        (
            is_delta and config.cluster.colocate,
            f"{mode}: with cluster.colocate = True engines read the trainer's memory and nothing travels; leave it out",
        ),
        (
            local is not None and not is_delta,
            f"update_weight_local_checkpoint_dir = {local} is not used with {mode}; set update_weight_mode = delta",
        ),
        (
            local is not None and bool(config.sglang.rollout_external_engine_addrs),
            f"update_weight_local_checkpoint_dir = {local}: the hosts of sglang.rollout_external_engine_addrs have no "
            "process of the run; leave it out, and the copy lies in update_weight_disk_dir, which they must see",
        ),
    ]
    return [f"sync.{problem}" for broken, problem in rules if broken]
