"""Memory of the weights on each GPU of an engine. Pure.

Input: settings, the shape of the model and the bytes of a weight. Output: bytes.
"""

from __future__ import annotations

from dataclasses import replace

from rlpost.config.plan.adapters import served_adapters
from rlpost.config.plan.shape import Shape, attention_elements, stored_bytes
from rlpost.config.tree import Config


def engine_weights(config: Config, shape: Shape, width: int) -> int:
    """Return the bytes that weights of ``width`` bytes each take on a GPU of an engine."""
    gpus = config.cluster.rollout_num_gpus_per_engine
    shape = replace(shape, mtp=drafts(config))
    projections = shape.num_layers * attention_elements(shape)
    everywhere = 0
    if (latent := shape.latent) is not None:
        # an engine keeps the projections to the narrow vectors on each GPU (SGLang, deepseek_v2.py)
        rows = latent.query_rank + latent.kv_rank + latent.position
        everywhere = shape.num_layers * rows * shape.hidden
        projections -= everywhere
    others = stored_bytes(shape, width) - width * (projections + everywhere)
    base = others // gpus + width * projections * replicas(config) // gpus + width * everywhere
    if not config.sends_adapters:
        return base
    return base + width * served_adapters(config.lora, shape, gpus)  # SGLang's memory for one


def drafts(config: Config) -> bool:
    """Whether engines hold the layer for multi-token prediction, as a draft model."""
    args = config.sglang.server_args
    return (
        args.get("speculative_algorithm") is not None
        and args.get("speculative_draft_model_path") is None
    )


def replicas(config: Config) -> int:
    """Data-parallel replicas of attention in an engine: fewer GPUs shard each one."""
    args = config.sglang.server_args
    return int(args.get("dp_size", 1)) if args.get("enable_dp_attention") else 1
