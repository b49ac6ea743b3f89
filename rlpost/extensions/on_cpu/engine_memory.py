"""Memory of an engine on a machine without GPUs. Pure but for the sizes of the model's files.

SGLang keeps ``1 - mem_fraction_static`` of the memory that is free at its start for others, and
fails when nothing is left of the rest once the weights are loaded. It measures twice, and other
processes take memory in between. The fraction reserves nothing: ``max_total_tokens`` bounds the KV
cache. So it is as large as it can be, except for a model with linear attention, whose states get a
share of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlpost.config.plan.hf_shape import weight_bytes
from rlpost.errors import ConfigError
from rlpost.models.config_file import read_config
from rlpost.models.model_types import HfConfig
from rlpost.observe.memory import GB

FLOAT32 = 4  # bytes: engines without a GPU compute in float32
LEAST, MOST = 0.1, 0.95
"""With and without linear attention."""
TRAINER = 4
"""Tensors of the size of the weights that a trainer rank on the same machine allocates at the same
time: weights, gradients and both moments."""


def memory_fraction(folder: Path, arguments: Mapping[str, object], free: int) -> float:
    """Return ``mem_fraction_static`` for an engine of the model in ``folder``.

    Args:
        arguments: fields of SGLang's ServerArgs with their defaults.
        free: bytes of the machine's memory that are available.

    Raises:
        ConfigError: weights and KV cache need more than that.
    """
    hf = read_config(folder)
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights = files * FLOAT32 // weight_bytes(hf)
    tokens = int(str(arguments["max_total_tokens"]))
    cache = tokens * cache_bytes(hf)
    if weights + cache > MOST * free:
        raise ConfigError(
            f"an engine of {folder} needs {(weights + cache) / GB:.1f} GB without a GPU: weights {weights / GB:.1f} GB "
            f"and a KV cache of {tokens} tokens {cache / GB:.1f} GB (--sglang-max-total-tokens); {free / GB:.1f} GB "
            "are free"
        )
    if hf.get("linear_num_value_heads") is None:
        return MOST
    return min(MOST, LEAST + ((1 + TRAINER) * weights + cache) / free)


def cache_bytes(hf: HfConfig) -> int:
    """Return the bytes of a token in the KV cache, as of attention in all layers."""
    if latent := hf.get("kv_lora_rank"):
        return hf["num_hidden_layers"] * (latent + hf.get("qk_rope_head_dim", 0)) * FLOAT32
    heads = hf["num_attention_heads"]
    width = hf.get("head_dim") or hf["hidden_size"] // heads
    groups = hf.get("num_key_value_heads") or heads
    return 2 * hf["num_hidden_layers"] * groups * width * FLOAT32
