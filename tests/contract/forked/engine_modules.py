"""Build SGLang's models on the meta device as one rank of an engine, to compare the planner with.

Input: for each case config.json, arguments of SGLang's server, free bytes and MiB of a GPU. Output:
a dictionary for each. It runs in a separate process, because it configures SGLang.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL_TYPES = {
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
DEFAULTS = {
    "max_position_embeddings": 40960,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Keys of config.json that SGLang reads and the planner does not."""


def group(size: int) -> SimpleNamespace:
    """Return what models read of a process group, on its first rank."""
    ends = {"is_first_rank": True, "is_last_rank": True}
    handles = dict.fromkeys(("device_group", "cpu_group", "pynccl_comm"))
    return SimpleNamespace(world_size=size, rank_in_group=0, **ends, **handles)


def resolved(case: dict[str, Any]) -> Any:
    """Return SGLang's ServerArgs with its own defaults for a GPU of that size."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.server_args import ServerArgs

    hf = DEFAULTS | case["hf"]
    hf.setdefault("model_type", MODEL_TYPES.get(hf["architectures"][0]))
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(hf))
    memory_hook.get_device_memory_capacity = lambda device=None: case["gpu_mib"]
    made = ServerArgs(
        model_path=str(folder),
        device="cuda",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        **{**case["server_args"], "load_format": "dummy"},
    )
    made.resolve_once()
    return made


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of a rank's parameters, and the settings that SGLang chooses."""
    import torch
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.memory_hook import reserve_for_graph_mb
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.models.registry import ModelRegistry

    args = resolved(case)
    cfg = resolving_view(args)
    ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    initialize_dp_attention_flags(args)
    parallel = runtime_context.get_parallel()
    config = ModelConfig.from_server_args(args)
    model_class, _ = ModelRegistry.resolve_model_cls(case["hf"]["architectures"])
    groups = {
        "world_group": group(parallel.tp_size),
        "pp_group": group(1),
        "tp_group": group(parallel.tp_size),
        "attn_tp_group": group(parallel.attn_tp_size),
        "moe_ep_group": group(parallel.moe_ep_size),
        "moe_tp_group": group(parallel.tp_size // parallel.moe_ep_size),
        "attn_cp_group": group(1),
    }
    torch.set_default_dtype(torch.bfloat16)
    with parallel.override(**groups):
        with torch.device("meta"):
            model = model_class(config.hf_config)
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        return {
            "weights": weights,
            "mem_fraction_static": cfg.mem_fraction_static,
            "graph_mib": reserve_for_graph_mb(args),
            "kv_cache": kv_cache_bytes(case["free"], weights),
            "kv_bytes_per_token": token_bytes(args, config),
        }


def kv_cache_bytes(free: int, weights: int) -> int:
    """Return what SGLang gives its KV cache if ``free`` bytes are free before the weights."""
    from sglang.srt.mem_cache import kv_cache_configurator

    left = (free - weights) / 2**30
    kv_cache_configurator.get_available_gpu_memory = lambda *_, **__: left
    owner = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        mambaish_config=None,
        model_config=SimpleNamespace(is_multimodal=False),
    )
    profile = kv_cache_configurator.KVCacheConfigurator._profile_available_bytes
    return profile(owner, free / 2**30)


def token_bytes(args: Any, config: Any) -> int:
    """Return SGLang's bytes of a token in the KV cache of a GPU."""
    import torch
    from sglang.srt.arg_groups.overrides import use_mla_backend
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    owner = SimpleNamespace(
        model_config=config,
        kv_cache_dtype=torch.bfloat16,
        server_args=SimpleNamespace(enable_hisparse=False),
        use_mla_backend=use_mla_backend(args),
        is_draft_worker=False,
    )
    pool = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
    pool.kv_cache_dtype_str = "auto"
    return pool._compute_cell_size(owner, config.num_hidden_layers)


def built(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answer to each case."""
    warnings.simplefilter("ignore")
    return [answer(case) for case in cases]
