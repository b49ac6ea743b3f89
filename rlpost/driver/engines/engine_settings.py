"""Settings of the server processes of one engine, and the requests that it gets at once. Pure.

Input: the settings of the run, the nodes of the engine, the port of their rendezvous. Output: the
arguments of ``rollout.engine.Engine`` for each node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.addresses import host_port
from rlpost.config.engine_args import engine_args
from rlpost.config.tree import Config
from rlpost.driver.placement import Slot


def settings_of_engine(config: Config, parts: Sequence[Slot], meeting: int) -> list[dict[str, Any]]:
    """Return the settings of each part of an engine, one per node."""
    extra: dict[str, object] = {"enable_memory_saver": True} if config.offload_rollout else {}
    extra |= engine_args(config)
    several: dict[str, object] = {"nnodes": len(parts)} if len(parts) > 1 else {}
    # With attention data parallelism, SGLang derives several ports from this address; without
    # one it chooses a port whose successors may belong to other engines.
    if several or config.sglang.shares_attention:
        several["dist_init_addr"] = host_port(parts[0].ip, meeting)
    server_args = {"nccl_port": meeting, **several, **extra, **config.sglang.server_args}
    return [
        {
            "model_path": config.checkpoint.hf_checkpoint,
            "server_args": server_args,
            "num_gpus": sum(part.num_gpus for part in parts),
            "node_rank": rank,
        }
        for rank in range(len(parts))
    ]


def num_slots(info: Mapping[str, Any], most: int) -> int:
    """Return how many requests an engine gets at once, from its /server_info; at most ``most``.

    They are those that it runs together and an eighth more: others wait in the driver, where any
    engine may take them.
    """
    states = info.get("internal_states") or ()
    running = sum(int(state.get("effective_max_running_requests_per_dp") or 0) for state in states)
    return min(most, running + running // 8 + 1) if running > 0 else most
