"""Decide which kernels compute attention over packed rows. Pure; standard library only.

Input: the model's attention on one rank, how a row is sharded, the GPU, the user's options.
Output: ``Choice``: TransformerEngine's attention with its ``cp_comm_type``, or the attention of this
package (``attention.PackedAttention``), whose kernels are torch's. Or the reason why none can.

``RULES`` is the table. Each row states what rules backends out. Sources:
``get_attention_backend`` (dot_product_attention/utils.py) and ``attn_forward_func_with_cp``
(context_parallel.py) of TransformerEngine 2.11; ``nvte_get_fused_attn_backend``
(fused_attn/fused_attn.cpp) for cuDNN 9.11 or newer, which torch 2.13 brings; ``varlen_attn``
(torch/nn/attention/varlen.py) and ``sdp_utils.cpp`` of torch 2.13. Rows are packed (``thd``),
the mask is causal, aligned to the last key of each sequence, and there is no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlpost.models.model_types import HfConfig, MegatronFields

FLASH, FUSED, UNFUSED = "flash", "fused", "unfused"
"""TransformerEngine's backends, named as in ``--attention-backend``: flash-attn, cuDNN, PyTorch."""
VARLEN = "varlen"
"""torch's FlashAttention over packed rows."""
OF_ENGINE = frozenset({FLASH, FUSED, UNFUSED})
P2P, A2A, ALL_GATHER = "p2p", "a2a", "all_gather"
"""Values of ``--cp-comm-type``: keys and values in a ring, heads in place of tokens, all keys."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU of a rank; ``has_flash_attention``: the package flash-attn is installed."""

    capability: tuple[int, int]
    has_flash_attention: bool = False


BEST_GPU = Gpu((9, 0), has_flash_attention=True)
"""Every rule that holds for it holds for all GPUs: an H100 with flash-attn."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What a rank computes."""

    heads: int  # of queries, on this rank
    groups: int  # of keys and values, on this rank
    key_width: int  # of a head of queries and keys
    value_width: int
    has_window: bool = False
    has_sinks: bool = False
    context: int = 1  # ranks that share a row
    is_16_bit: bool = True  # bfloat16 or float16
    is_deterministic: bool = False
    shares_rows: bool = False  # sequences have keys in common (``--share-prefix``)

    @property
    def widest(self) -> int:
        """Width of the padded heads of FlashAttention, which has one for all three tensors."""
        return max(self.key_width, self.value_width)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that rules backends out."""

    reason: str
    rules_out: frozenset[str]
    holds: Callable[[Attention, str, Gpu], bool]
    """``(attention, cp_comm_type, gpu)``; ``cp_comm_type`` counts with context parallelism only."""


def _rule(
    reason: str, rules_out: set[str] | frozenset[str], holds: Callable[[Attention, str, Gpu], bool]
) -> Rule:
    return Rule(reason, frozenset(rules_out), holds)


def _cudnn_lacks_widths(a: Attention, gpu: Gpu) -> bool:
    """Training: widths to 128; to 256 on Hopper, unless unequal; 192 with 128 from Hopper on."""
    widths = (a.key_width, a.value_width)
    if max(widths) <= 128 or (widths == (192, 128) and gpu.capability >= (9, 0)):
        return False
    unequal = a.key_width != a.value_width and min(widths) >= 128
    return gpu.capability != (9, 0) or max(widths) > 256 or unequal


RULES = (
    # what TransformerEngine does not compute over packed rows
    _rule("it has no attention sinks in packed rows", OF_ENGINE, lambda a, _, __: a.has_sinks),
    _rule(
        "with context parallelism it has no keys that sequences share (--share-prefix)",
        OF_ENGINE,
        lambda a, _, __: a.shares_rows and a.context > 1,
    ),
    _rule(
        "cuDNN aligns windows to the first key, and sequences that share keys end at the last",
        {FUSED},
        lambda a, _, __: a.shares_rows and a.has_window,
    ),
    _rule(
        "PyTorch's attention there has as many keys as queries, and sequences that share keys more",
        {UNFUSED},
        lambda a, _, __: a.shares_rows,
    ),
    _rule(
        "flash-attn and cuDNN compute in 16 bits, and the weights have float32",
        {FLASH, FUSED},
        lambda a, _, __: not a.is_16_bit,
    ),
    # context parallelism
    _rule(
        "PyTorch's attention there has no context parallelism",
        {UNFUSED},
        lambda a, _, __: a.context > 1,
    ),
    _rule(
        "with context parallelism only --cp-comm-type a2a has sliding windows in packed rows",
        OF_ENGINE,
        lambda a, comm, _: a.context > 1 and a.has_window and comm != A2A,
    ),
    _rule(
        "with context parallelism only --cp-comm-type p2p has values of another width than keys",
        OF_ENGINE,
        lambda a, comm, _: a.context > 1 and a.key_width != a.value_width and comm != P2P,
    ),
    _rule(
        "--cp-comm-type all_gather has no packed rows",
        OF_ENGINE,
        lambda a, comm, _: a.context > 1 and comm == ALL_GATHER,
    ),
    _rule(
        "--cp-comm-type a2a needs heads, and groups of keys and values, of a tensor-parallel rank "
        "that --context-parallel-size divides",
        OF_ENGINE,
        lambda a, comm, _: (
            a.context > 1 and comm == A2A and bool(a.heads % a.context or a.groups % a.context)
        ),
    ),
    _rule(
        "the trainer forms no groups for this --cp-comm-type; p2p, a2a and all_gather are known",
        OF_ENGINE,
        lambda a, comm, _: a.context > 1 and comm not in (P2P, A2A, ALL_GATHER),
    ),
    # the GPU
    _rule(
        "FlashAttention needs a GPU of compute capability 8.0 or more (Ampere)",
        {FLASH, FUSED, VARLEN},
        lambda a, _, gpu: a.is_16_bit and gpu.capability < (8, 0),
    ),
    _rule(
        "flash-attn is not installed", {FLASH}, lambda _, __, gpu: not gpu.has_flash_attention
    ),
    _rule(
        "cuDNN has packed rows on Hopper and data-centre Blackwell only (capability 9.x to 11.x)",
        {FUSED},
        lambda _, __, gpu: not (9, 0) <= gpu.capability < (12, 0),
    ),
    _rule(
        "cuDNN is not deterministic in training on Blackwell",
        {FUSED},
        lambda a, _, gpu: a.is_deterministic and gpu.capability >= (10, 0),
    ),
    # widths of heads
    _rule(
        "flash-attn has one width for keys and values",
        {FLASH},
        lambda a, _, __: a.key_width != a.value_width,
    ),
    _rule(
        "these kernels need head widths that 8 divides",
        {FLASH, FUSED},
        lambda a, _, __: bool(a.key_width % 8 or a.value_width % 8),
    ),
    _rule(
        "FlashAttention has heads of at most 256",
        {FLASH, VARLEN},
        lambda a, _, __: a.is_16_bit and a.widest > 256,
    ),
    _rule(
        "torch's FlashAttention trains no heads of 200 to 224 on sm86, sm89 and sm12x",
        {VARLEN},
        lambda a, _, gpu: (
            a.is_16_bit
            and 192 < a.widest <= 224
            and ((8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0))
        ),
    ),
    _rule(
        "flash-attn has heads wider than 192 on sm80, sm90, sm100 and sm120 only",
        {FLASH},
        lambda a, _, gpu: (
            a.widest > 192 and gpu.capability not in ((8, 0), (9, 0), (10, 0), (12, 0))
        ),
    ),
    _rule(
        "cuDNN does not train heads of this width on this GPU",
        {FUSED},
        lambda a, _, gpu: _cudnn_lacks_widths(a, gpu),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """What computes attention.

    ``backends``: of TransformerEngine, that may do so; empty for the attention of this package.
    ``reason``: why TransformerEngine's was passed over; None if it was not.
    """

    backends: frozenset[str] = frozenset()
    cp_comm_type: str | None = None
    reason: str | None = None

    @property
    def is_of_engine(self) -> bool:
        """Whether TransformerEngine computes attention."""
        return bool(self.backends)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of Megatron-core that the user gave; None: not given."""

    cp_comm_type: object = None
    backend: str | None = None

    @classmethod
    def of(cls, megatron: Mapping[str, object]) -> Options:
        """Read fields of TransformerConfig by name."""
        backend = megatron.get("attention_backend")
        return cls(
            megatron.get("cp_comm_type"), None if backend in (None, "auto") else str(backend)
        )


def backends(attention: Attention, gpu: Gpu, *, cp_comm_type: str = P2P) -> frozenset[str]:
    """Return the backends that ``RULES`` leave."""
    out = [rule.rules_out for rule in RULES if rule.holds(attention, cp_comm_type, gpu)]
    return (OF_ENGINE | {VARLEN}).difference(*out)


def _reasons(attention: Attention, gpu: Gpu, cp_comm_type: str, wanted: frozenset[str]) -> str:
    """Return why the wanted backends are ruled out."""
    return "; ".join(
        rule.reason
        for rule in RULES
        if rule.rules_out & wanted and rule.holds(attention, cp_comm_type, gpu)
    )


def choose(
    attention: Attention, gpu: Gpu | None, *, with_engine: bool, options: Options = Options()
) -> Choice | str:
    """Return what computes attention, or the problem if nothing can, with its remedy.

    TransformerEngine's attention comes first, but its unfused backend only on request: its scores
    take memory of the square of the longest sequence. The exchange of context parallelism is p2p,
    and a2a for a model with windows, unless the user gives one.

    Args:
        gpu: None on a CPU, where this package computes all of it.
        with_engine: whether the layers are TransformerEngine's.
    """
    if gpu is None:
        return Choice()
    if options.backend == "local":
        return (
            "--attention-backend local: kernels of attention are chosen for each model and GPU, "
            "TransformerEngine's where it has one; leave it out"
        )
    if not with_engine:
        return Choice() if _has_kernel(attention, gpu) else _no_kernel(attention, gpu)
    comm = options.cp_comm_type
    if comm is None:
        comm = A2A if attention.has_window else P2P
    candidates = frozenset({options.backend} if options.backend else {FLASH, FUSED})
    # Megatron-core 0.16.1 indexes a list with layer numbers from 1 (transformer_layer.py): unknown
    if usable := candidates & backends(attention, gpu, cp_comm_type=str(comm)):
        return Choice(usable, str(comm) if attention.context > 1 else None)
    reason = _reasons(attention, gpu, str(comm), candidates)
    if options.cp_comm_type is not None and attention.context > 1:
        return (
            f"--cp-comm-type {comm}: TransformerEngine's attention cannot shard this model's rows "
            f"this way ({reason}); leave it out"
        )
    if options.backend in (FUSED, UNFUSED):
        return (
            f"--attention-backend {options.backend}: TransformerEngine's attention cannot compute "
            f"this model on this GPU with it ({reason}); leave it out"
        )
    return Choice(reason=reason) if _has_kernel(attention, gpu) else _no_kernel(attention, gpu)


def _has_kernel(attention: Attention, gpu: Gpu) -> bool:
    """Whether this package computes it: float32 on any GPU, 16 bits with torch's kernel."""
    return not attention.is_16_bit or VARLEN in backends(attention, gpu)


def _no_kernel(attention: Attention, gpu: Gpu) -> str:
    sm = "".join(map(str, gpu.capability))
    reasons = _reasons(attention, gpu, P2P, frozenset({VARLEN}))
    return (
        f"no kernel computes the attention of this model (heads of {attention.key_width} and "
        f"{attention.value_width}) in 16 bits on a GPU of sm{sm}: {reasons}; use another GPU or "
        "--bf16 false"
    )


def attention_of(
    hf: HfConfig,
    fields: MegatronFields,
    *,
    head_dim: int,
    tensor: int,
    context: int,
    is_16_bit: bool = True,
    is_deterministic: bool = False,
    shares_rows: bool = False,
) -> Attention:
    """Describe the attention of a rank.

    Args:
        hf: config.json.
        fields: the family's fields of Megatron's TransformerConfig.
        head_dim: width of a head, in latent attention of its part without position.
        tensor: ranks that share a layer.
        context: ranks that share a row.
    """
    latent = fields.get("multi_latent_attention", False)
    heads = hf["num_attention_heads"]
    groups = heads if latent else hf["num_key_value_heads"]
    return Attention(
        heads // tensor,
        max(groups // tensor, 1),
        head_dim + (fields["qk_pos_emb_head_dim"] if latent else 0),
        fields["v_head_dim"] if latent else head_dim,
        has_window=fields.get("window_size") is not None,
        has_sinks=fields.get("softmax_type", "vanilla") != "vanilla",
        context=context,
        is_16_bit=is_16_bit,
        is_deterministic=is_deterministic,
        shares_rows=shares_rows,
    )
