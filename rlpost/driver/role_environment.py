"""Environment variables that differ by role, or on which trainer and engines must agree. Pure.

Input: the settings of the run and the environment of the job, which all workers inherit. Output:
one row for each variable. None leaves the inherited value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.config.engine_args import FEATURE_CACHE, engine_variables
from rlpost.config.groups.perf import trains_in_blocks
from rlpost.config.tree import Config
from rlpost.engines.cuda_graphs import REGISTER, VARIABLE, graph_settings

MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
CUMEM, MNNVL = "NCCL_CUMEM_ENABLE", "NCCL_MNNVL_ENABLE"
DEEP_EP, FP8_BLOCKS = "RLPOST_DEEP_EP", "RLPOST_FP8_BLOCKS"
MNNVL_AUTO = "2"  # NCCL's default


@dataclass(frozen=True, slots=True)
class RoleVariable:
    """A variable, its value in a trainer rank and in an engine, and the reason."""

    name: str
    trainer: str | None
    engine: str | None
    why: str


def role_variables(config: Config, environment: Mapping[str, str]) -> tuple[RoleVariable, ...]:
    """Return the table. ``environment`` is the environment of the job."""
    cumem, mnnvl = _shared_by_broadcast(config, environment)
    releases = config.cluster.offload_nccl  # only with --colocate, which has no broadcast
    server_args = {"enable_memory_saver": config.offload_rollout, **config.sglang.server_args}
    graphs = graph_settings(server_args, environment).environment
    return (
        RoleVariable(
            MAX_CONNECTIONS,
            "1",
            None,
            "overlapped tensor-parallel collectives rely on one queue; SGLang sets 8",
        ),
        RoleVariable(
            DEEP_EP,
            "1" if config.perf.moe_token_dispatcher_type == "flex" else None,
            None,
            "ranks import DeepEP only where they dispatch with it (rlpost/trainer/optional_packages.py)",
        ),
        RoleVariable(
            FP8_BLOCKS,
            "1" if trains_in_blocks(config.megatron.options) else None,
            None,
            "ranks set what TransformerEngine reads while it is imported (rlpost/trainer/fp8_grid.py)",
        ),
        RoleVariable(
            CUMEM,
            "1" if releases else cumem,
            cumem,
            "decides how NCCL imports memory of a peer on the same node (transport/p2p.cc), so all "
            "ranks of the communicator that broadcasts weights need one value; NCCL releases only "
            "what it allocated with 1 (--offload-nccl)",
        ),
        RoleVariable(
            MNNVL,
            mnnvl,
            mnnvl,
            "decides which nodes NCCL joins by NVLink; SGLang would set 1 for its ranks alone",
        ),
        RoleVariable(
            VARIABLE,
            None,
            graphs.get(VARIABLE),
            "captures CUDA graphs in memory that the engine can release",
        ),
        RoleVariable(
            REGISTER,
            None,
            graphs.get(REGISTER),
            "NCCL would keep buffers of released graphs registered, and their replay hangs",
        ),
        RoleVariable(
            FEATURE_CACHE,
            None,
            engine_variables(config).get(FEATURE_CACHE),
            "SGLang would keep features of images across updates of a trained encoder",
        ),
    )


def trainer_environment(config: Config, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in every trainer rank."""
    rows = role_variables(config, given)
    return {row.name: row.trainer for row in rows if row.trainer is not None}


def engine_environment(config: Config, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in every worker of the run's own engines."""
    rows = role_variables(config, given)
    return {row.name: row.engine for row in rows if row.engine is not None}


def _shared_by_broadcast(config: Config, given: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return the values of CUMEM and MNNVL where weights are broadcast, else None.

    Elsewhere trainer and engines share no communicator, and each keeps its library's default.
    SGLang sets CUMEM to 1 with ``enable_symm_mem`` whatever the environment says.
    """
    if config.cluster.colocate or config.sync.update_weight_transport == "disk":
        return None, None
    is_symmetric = bool(config.sglang.server_args.get("enable_symm_mem"))
    return "1" if is_symmetric else given.get(CUMEM, "0"), given.get(MNNVL, MNNVL_AUTO)
