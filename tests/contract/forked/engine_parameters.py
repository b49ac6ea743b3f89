"""Find parameters and buffers of SGLang's models that no update fills, on a CPU.

Input: Hugging Face folders of tiny models. Output: a list of names for each. All parameters and
stored buffers are set to NaN before the folder's tensors are loaded, as an update loads them; the
listed ones have NaN after it. It runs in a separate process, because it configures SGLang.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

from rlpost.engines import server
from rlpost.extensions.on_cpu.engine import engine_settings
from tests.contract.families import load_folder


def group() -> SimpleNamespace:
    """Return what models read of a process group of one rank."""
    handles = dict.fromkeys(("device_group", "cpu_group", "pynccl_comm"))
    return SimpleNamespace(
        world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True, **handles
    )


def unfilled(folder: Path) -> list[str]:
    """Return the names of the model's parameters and stored buffers that keep NaN."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.model_loader.loader import _get_quantization_config
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": str(folder), "skip_tokenizer_init": True}
    args = ServerArgs(**server.engine_arguments(engine_settings(given)))
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    initialize_dp_attention_flags(args)
    parallel = runtime_context.get_parallel()
    config = ModelConfig.from_server_args(args)
    config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), 1)
    model_class, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    names = ("world", "pp", "tp", "attn_tp", "moe_ep", "moe_tp", "attn_cp")
    with parallel.override(**{f"{name}_group": group() for name in names}):
        quantisation = _get_quantization_config(config, LoadConfig())
        model = model_class(config.hf_config, quant_config=quantisation)
        stored = {
            name: one for name, one in model.state_dict().items() if torch.is_floating_point(one)
        }
        for one in stored.values():
            one.fill_(float("nan"))
        model.load_weights(iter(load_folder(folder).items()))
    return [name for name, one in stored.items() if one.float().isnan().any()]


def all_unfilled(folders: list[Path]) -> list[list[str]]:
    """Return the names of each folder's model."""
    warnings.simplefilter("ignore")
    return [unfilled(folder) for folder in folders]
