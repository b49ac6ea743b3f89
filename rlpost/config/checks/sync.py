"""Check the table [sync] for conflicting or missing settings. Pure.

Input: a ``Config``. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config
from rlpost.config.wording import spelled


def sync_problems(config: Config) -> list[str]:
    """Problems of the table [sync]."""
    sync, is_delta = config.sync, config.sync.update_weight_mode == "delta"
    is_local = sync.update_weight_local_checkpoint_dir is not None
    mode = spelled(config, "update_weight_mode")
    local = spelled(config, "update_weight_local_checkpoint_dir")
    rules = [
        (
            is_delta and config.cluster.colocate,
            f"{mode} with --colocate true: engines read the trainer's GPU memory, so nothing is sent; use "
            "--update-weight-mode full",
        ),
        (
            is_delta and sync.update_weight_transport != "disk",
            f"{mode} with {spelled(config, 'update_weight_transport')}: SGLang accepts delta updates only from "
            "files; use --update-weight-transport disk, or --update-weight-mode full",
        ),
        (
            is_local and not is_delta,
            f"{local} is not used with {mode}; use --update-weight-mode delta with --update-weight-transport disk, or "
            "--update-weight-local-checkpoint-dir none",
        ),
        (
            is_local and bool(config.sglang.rollout_external_engine_addrs),
            f"{local} with {spelled(config, 'rollout_external_engine_addrs')}: this run has no process on the "
            "hosts of those engines to write it; use --update-weight-local-checkpoint-dir none, and a "
            "--update-weight-disk-dir that the engines can read",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def load_format_problems(config: Config) -> list[str]:
    """Engines that start with random weights which no update replaces.

    With transport memory, every update fills all that an engine stores
    (tests/contract/test_engine_parameters.py). SGLang reads files of updates by the same setting.
    """
    if config.sglang.server_args.get("load_format") != "dummy":
        return []
    sync, debug = config.sync, config.debug
    has_draft = config.sglang.server_args.get("speculative_algorithm") is not None
    reasons = [
        (sync.update_weight_transport == "disk", spelled(config, "update_weight_transport")),
        (debug.debug_rollout_only, "--debug-rollout-only true"),
        (has_draft, "--sglang-speculative-algorithm, whose weights may not be sent"),
    ]
    return [
        f"--sglang-load-format dummy with {reason}: engines would keep random weights; leave it out"
        for is_so, reason in reasons
        if is_so
    ]
