"""Memory of an engine on each of its GPUs: weights, KV cache, CUDA graphs. Pure.

Input: settings, the shape of the model, the memory of a GPU. Output: a ``PlannedEngine``. The
arithmetic is SGLang's 0.5.21: ``KVCacheConfigurator._profile_available_bytes`` and
``DefaultPoolConfigurator`` for the KV cache, ``handle_gpu_memory_settings`` and
``reserve_for_graph_mb`` (``arg_groups/memory_hook.py``) where the settings leave values to it.
Sliding windows and linear attention are counted as full attention, which takes more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlpost.config.engine_args import attention_gpus, replicas
from rlpost.config.plan.shape import Shape, attention_elements
from rlpost.config.plan.vision import VisionShape
from rlpost.config.tree import Config
from rlpost.extensions.planning.adapters import served_adapters
from rlpost.extensions.planning.counts import stored_bytes
from rlpost.extensions.planning.nccl_memory import MIB, engine_context

GRAPH_BYTES = 2 * MIB
"""SGLang's allowance for the CUDA graphs of decoding, for each request of the largest batch."""
NUM_PREFILL_GRAPHS = {2048: 42, 4096: 50, 8192: 58, 16384: 74}
"""By prefill tokens: graphs of SGLang's default list, each with an allowance of 8 MiB."""


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """One GPU of an engine."""

    weights: int
    kv_cache: int
    kv_bytes_per_token: float
    kv_tokens: int
    """Tokens of all requests of an engine that fit in its KV cache."""
    context: int
    """CUDA and NCCL."""
    graphs: int
    """CUDA graphs; in host memory while the engine is offloaded."""

    @property
    def resident(self) -> int:
        """Weights, KV cache and graphs."""
        return self.weights + max(0, self.kv_cache) + self.graphs


def planned_engine(
    config: Config, shape: Shape, *, gpu_bytes: int, width: int, held: int
) -> PlannedEngine:
    """Plan an engine.

    SGLang gives ``mem_fraction_static`` of the memory that is free when an engine starts to weights
    and KV cache.

    Args:
        config: the settings.
        shape: of the model.
        gpu_bytes: memory of a GPU.
        width: bytes of a weight.
        held: bytes of a GPU that others hold when the engine starts.
    """
    weights = engine_weights(config, shape, width)
    context = engine_context(config, attention_gpus(config))
    fraction = float(
        config.sglang.server_args.get("mem_fraction_static")
        or default_fraction(config, shape, gpu_bytes)
    )
    cache = int(fraction * (gpu_bytes - held - context)) - weights
    per_token = kv_bytes_per_token(config, shape)
    tokens = int(cache / per_token) * replicas(config)
    return PlannedEngine(weights, cache, per_token, tokens, context, graph_bytes(config, gpu_bytes))


def kv_bytes_per_token(config: Config, shape: Shape) -> float:
    """Bytes of a token in the KV cache of a GPU, with those of a draft layer."""
    given = str(config.sglang.server_args.get("kv_cache_dtype", "auto"))
    width = 1 if given.startswith("fp8") else 2
    heads = max(1.0, shape.groups / attention_gpus(config))
    each = 2 * heads * shape.head_dim
    if shape.latent is not None:  # one narrow vector for all heads, on each GPU
        each = shape.latent.kv_rank + shape.latent.position
    return width * each * (shape.num_layers + drafts(config))


def graph_bytes(config: Config, gpu_bytes: int) -> int:
    """SGLang's allowance for the CUDA graphs of decoding; 0 without."""
    args = config.sglang.server_args
    if args.get("disable_cuda_graph") or args.get("disable_decode_cuda_graph"):
        return 0
    return GRAPH_BYTES * _largest_batch(config, gpu_bytes)


def _largest_batch(config: Config, gpu_bytes: int) -> int:
    """Requests of the largest CUDA graph."""
    args = config.sglang.server_args
    if sizes := args.get("cuda_graph_bs_decode"):
        return max(map(int, sizes))
    if given := args.get("cuda_graph_max_bs_decode"):
        return int(given)
    is_small_engine = config.cluster.rollout_num_gpus_per_engine < 4
    for bound_gib, small, large in ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512)):
        if gpu_bytes < bound_gib * 2**30:
            return small if is_small_engine else large
    return 512


def default_fraction(config: Config, shape: Shape, gpu_bytes: int) -> float:
    """The ``mem_fraction_static`` that SGLang chooses."""
    args = config.sglang.server_args
    gpu_mib = gpu_bytes / MIB
    chunk = int(args.get("chunked_prefill_size") or _prefill_tokens(gpu_bytes))
    reserved = 512 + 1.5 * max(chunk, 2048)
    reserved += config.cluster.rollout_num_gpus_per_engine / 8 * 1024
    reserved += graph_bytes(config, gpu_bytes) / MIB
    if (num_replicas := replicas(config)) > 1:
        batch = _largest_batch(config, gpu_bytes)
        reserved += batch * num_replicas * (4.5 if batch > 300 else 3)
    if _captures_prefill(config):
        graphs = 8 * NUM_PREFILL_GRAPHS.get(chunk, 58)
        reserved += 1536 if shape.latent is not None else graphs
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    return fraction if shape.vision is None else fraction * _left_by_images(shape.vision)


def _left_by_images(encoder: VisionShape) -> float:
    """The factor of models with images: ``adjust_mem_fraction_for_vlm`` of SGLang's memory_hook.py.

    It compares hidden sizes alone: no config.json of these families has ``num_hidden_layers``.
    """
    more = (encoder.hidden / 1024) ** 2 - 1
    return 0.95 * max(0.8, min(1.05, 1 - 0.1 * more))


def _captures_prefill(config: Config) -> bool:
    """Whether engines capture graphs of prefill; not with offload (engines/cuda_graphs.py)."""
    args = config.sglang.server_args
    if args.get("disable_cuda_graph") or args.get("disable_prefill_cuda_graph"):
        return False
    default = "disabled" if config.offload_rollout else "breakable"
    backend: str = args.get("cuda_graph_backend_prefill", default)
    return backend != "disabled"


def _prefill_tokens(gpu_bytes: int) -> int:
    """SGLang's default for ``chunked_prefill_size``."""
    for bound_gib, tokens in ((20, 2048), (60, 4096), (160, 8192)):
        if gpu_bytes < bound_gib * 2**30:
            return tokens
    return 16384


@dataclass(frozen=True, slots=True)
class EngineShares:
    """How many GPUs of an engine share which weights; each group consists of adjacent ones.

    The sharding is that of SGLang 0.5.21 (``sglang/srt/models/glm4_moe.py``, ``deepseek_v2.py``):
    the GPUs of an attention replica share attention and, with DP attention, the embedding; all
    GPUs share experts, and dense MLPs unless ``moe_dense_tp_size`` is 1; routers are whole on each.
    """

    gpus: int
    """All, which share shared experts."""
    attention: int
    """Attention and the embedding."""
    output: int
    """The output layer."""
    dense: int
    """Dense MLPs."""
    expert_groups: int
    """Groups of GPUs with different experts; those of a group share each of their experts."""
    has_draft: bool
    """Whether each has the layer for multi-token prediction."""


def engine_shares(config: Config, shape: Shape) -> EngineShares:
    """The shares that the settings ask for."""
    args = config.sglang.server_args
    gpus, attention = config.cluster.rollout_num_gpus_per_engine, attention_gpus(config)
    is_alone = any(shape.sparse) and args.get("moe_dense_tp_size") == 1
    return EngineShares(
        gpus=gpus,
        attention=attention,
        output=attention if args.get("enable_dp_lm_head") else gpus,
        dense=1 if is_alone else gpus,
        expert_groups=int(args.get("ep_size") or 1),
        has_draft=drafts(config),
    )


def engine_weights(config: Config, shape: Shape, width: int) -> int:
    """Return the bytes that weights of ``width`` bytes each take on a GPU of an engine."""
    shares = engine_shares(config, shape)
    gpus, attention_gpus = shares.gpus, shares.attention
    shape = replace(shape, mtp=shares.has_draft)
    embedding = 2 * shape.vocab * shape.hidden
    router = 2 * sum(shape.sparse) * shape.num_experts * shape.hidden
    parts = [
        *_attention(shape, width, attention_gpus),
        (embedding, attention_gpus),  # all GPUs without DP attention
        (0 if shape.tied else embedding, shares.output),
        (router, 1),
    ]
    if shares.dense == 1:
        num_dense = shape.num_layers - sum(shape.sparse)
        parts.append((width * num_dense * 3 * shape.hidden * shape.ffn, 1))
    others = stored_bytes(shape, width) - sum(size for size, _ in parts)
    base = others // gpus + sum(size // shards for size, shards in parts)
    base += _copied_heads(shape, width, attention_gpus)
    base += _encoder(config, shape, width, attention_gpus)
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


def _encoder(config: Config, shape: Shape, width: int, gpus: int) -> int:
    """Bytes of the encoder of images, which engines load whether or not prompts have images.

    The GPUs share its layers and mergers, unless each encodes other images; never in FP8.
    """
    if (encoder := shape.vision) is None:
        return 0
    shared = encoder.parameters - encoder.of_inputs
    if not config.sglang.server_args.get("mm_enable_dp_encoder"):
        shared //= gpus
    return max(width, 2) * (encoder.of_inputs + shared)


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
