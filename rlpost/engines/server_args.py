"""Checks settings that are passed through to SGLang's ServerArgs.

Input: names and values of pass-through settings. Output: None, or an error with one line for each
invalid setting. On a login node without SGLang, the table of the pinned version is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpost.config.server_arg_values import (
    OPAQUE,
    ServerArgTable,
    server_arg_table,
    typed_args,
    typed_value,
)
from rlpost.config.wording import divisors, listed, value_text
from rlpost.errors import ConfigError, suggestion

OURS = {
    "host": "the engine's node",
    "port": "the ports of the job",
    "nccl_port": "the ports of the job",
    "dist_init_addr": "the nodes and ports of the job",
    "nnodes": "--rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "the nodes of the job",
    "base_gpu_id": "the GPUs that the engine's process sees",
    "model_path": "--hf-checkpoint",
    "tokenizer_path": "--hf-checkpoint",
    "api_key": "the secret of the attempt",
    "admin_api_key": "the secret of the attempt",
    "tp_size": "--rollout-num-gpus-per-engine",
    "weight_version": "the policy version",
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "incremental_streaming_output": "--partial-rollout-record-s",
}
"""Fields that rlpost sets itself, and what they are derived from."""


def check_server_args(
    server_args: Mapping[str, object], *, gpus_per_engine: int | None = None
) -> None:
    """Check that each setting exists in SGLang, has a valid value and is not set by rlpost itself.

    Args:
        server_args: settings by SGLang's names, without the prefix ``sglang_``.
        gpus_per_engine: tensor-parallel size of an engine; None skips the checks that depend on it.

    Raises:
        ConfigError: one line for each problem: flag, value, constraint, remedy.
    """
    table = server_arg_table()
    problems = [
        problem
        for name, value in server_args.items()
        if (problem := _problem(table, name, value)) is not None
    ]
    if not problems:
        problems = list(_size_problems(typed_args(server_args, table), gpus_per_engine))
    if problems:
        raise ConfigError("\n".join(problems))


def _problem(table: ServerArgTable, setting: str, value: object) -> str | None:
    name = table.name_of(setting)
    flag = sglang_flag(setting)
    if name in OURS:
        return f"{flag}: this follows from {OURS[name]}; leave it out"
    arg = table.args.get(name)
    if arg is None and not table.is_complete:
        return None  # SGLang checks it when the engine starts
    if arg is None:
        settable = [
            other for other, one in table.args.items() if other not in OURS and one.kind != OPAQUE
        ]
        near = suggestion(flag, [sglang_flag(other) for other in (*settable, *table.names)])
        return f"{flag}: {table.source} has no setting {setting!r}{near}"
    try:
        typed_value(name, arg, value)
    except ValueError as error:
        if value is True and arg.kind != "bool":  # a flag without a value
            return f"{flag}: needs a value, {error}"
        return f"{flag} {value_text(value)}: {error}"
    return None


def _size_problems(server_args: Mapping[str, Any], gpus: int | None) -> Iterator[str]:
    """Yield problems of the parallel sizes inside an engine."""
    replicas = server_args.get("dp_size", 1)
    gpus_text = f"the {gpus} GPUs of an engine" if gpus and gpus > 1 else "the GPU of an engine"
    if replicas > 1 and not server_args.get("enable_dp_attention"):
        yield (
            f"--sglang-dp-size {replicas}: without data-parallel attention SGLang starts {replicas} whole replicas, "
            f"which need {replicas} times {gpus_text}; add --sglang-enable-dp-attention, or use more engines instead "
            "(--rollout-num-gpus, --rollout-num-gpus-per-engine)"
        )
    elif gpus and gpus % replicas:
        yield f"--sglang-dp-size {replicas}: does not divide {gpus_text}; use {listed(divisors(gpus))}"
    if (stages := server_args.get("pp_size", 1)) > 1:
        yield (
            f"--sglang-pp-size {stages}: tensor parallelism takes all of {gpus_text}, none are left for pipeline "
            "stages; leave it out and use a larger --rollout-num-gpus-per-engine"
        )
    dense = server_args.get("moe_dense_tp_size")
    if gpus and dense is not None and dense not in (1, gpus):
        yield f"--sglang-moe-dense-tp-size {dense}: SGLang knows 1, or all of {gpus_text}; use 1 or leave it out"


def sglang_flag(name: str) -> str:
    """Return the flag of one of SGLang's settings."""
    return "--sglang-" + name.replace("_", "-")
