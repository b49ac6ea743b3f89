"""Memory of the weights on each GPU of an engine. Pure.

Input: settings, the shape of the model and the bytes of a weight. Output: bytes. The sharding is
that of SGLang 0.5.21 (``sglang/srt/models/glm4_moe.py``, ``deepseek_v2.py``): the GPUs of an
attention replica share attention and, with DP attention, the embedding; all GPUs share experts,
and dense MLPs unless ``moe_dense_tp_size`` is 1; routers are whole on each GPU.
"""

from __future__ import annotations

from dataclasses import replace

from rlpost.config.plan.adapters import served_adapters
from rlpost.config.plan.shape import Shape, attention_elements, stored_bytes
from rlpost.config.tree import Config


def engine_weights(config: Config, shape: Shape, width: int) -> int:
    """Return the bytes that weights of ``width`` bytes each take on a GPU of an engine."""
    args = config.sglang.server_args
    gpus = config.cluster.rollout_num_gpus_per_engine
    of_attention = attention_gpus(config)
    shape = replace(shape, mtp=drafts(config))
    embedding = 2 * shape.vocab * shape.hidden
    router = 2 * sum(shape.sparse) * shape.num_experts * shape.hidden
    head_gpus = of_attention if args.get("enable_dp_lm_head") else gpus
    parts = [
        *_attention(shape, width, of_attention),
        (embedding, of_attention),  # all GPUs without DP attention
        (0 if shape.tied else embedding, head_gpus),
        (router, 1),
    ]
    if any(shape.sparse) and args.get("moe_dense_tp_size") == 1:
        num_dense = shape.num_layers - sum(shape.sparse)
        parts.append((width * num_dense * 3 * shape.hidden * shape.ffn, 1))
    others = stored_bytes(shape, width) - sum(size for size, _ in parts)
    base = others // gpus + sum(size // shards for size, shards in parts)
    base += _copied_heads(shape, width, of_attention)
    if not config.sends_adapters:
        return base
    return base + width * served_adapters(config.lora, shape, gpus)  # SGLang's memory for one


def _attention(shape: Shape, width: int, gpus: int) -> list[tuple[int, int]]:
    """Bytes of all layers' attention, with the number of GPUs that share them."""
    projections = width * shape.num_layers * attention_elements(shape)
    if (latent := shape.latent) is None:
        return [(projections, gpus)]
    # an engine keeps the projections to the narrow vectors on each GPU (SGLang, deepseek_v2.py)
    rows = latent.query_rank + latent.kv_rank + latent.position
    everywhere = width * shape.num_layers * rows * shape.hidden
    return [(everywhere, 1), (projections - everywhere, gpus)]


def _copied_heads(shape: Shape, width: int, gpus: int) -> int:
    """Bytes of key and value heads on a GPU beyond its share: each GPU has at least one."""
    if shape.latent is not None:
        return 0
    missing = max(0.0, 1 - shape.groups / gpus)
    return int(2 * missing * width * shape.num_layers * shape.head_dim * shape.hidden)


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


def attention_gpus(config: Config) -> int:
    """GPUs of an engine that share an attention replica."""
    return max(1, config.cluster.rollout_num_gpus_per_engine // replicas(config))
