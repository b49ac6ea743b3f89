"""The settings that need TransformerEngine or are slower without it. Pure.

Input: settings. Output: a ``Need`` for each such setting. The caller knows whether
TransformerEngine is installed: the login node if it has the environment of the nodes, the image
doctor, and the trainer when it builds its model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.config.flags import flag
from rlpost.config.wording import value_text

if TYPE_CHECKING:
    from rlpost.config.groups.optimizer import OptimizerConfig
    from rlpost.config.groups.perf import PerfConfig
    from rlpost.config.tree import Config
    from rlpost.models.model_types import MegatronFields

PAGE = "docs/actor.md"
RULED_OUT = "whose layers have no adapters (--lora-rank)"
OPTIMIZER_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True, slots=True)
class Need:
    """A setting that uses TransformerEngine."""

    setting: str
    """``--flag value``, or ``--flag, not given``."""
    reason: str
    """The part of TransformerEngine that it uses."""
    otherwise: str
    """The remedy without TransformerEngine, or the consequence if it is not required."""
    is_required: bool

    @property
    def is_of_layers(self) -> bool:
        """Whether it needs TransformerEngine's layers, and not only its Adam."""
        return self.setting.split()[0] not in {flag(name) for name in OPTIMIZER_TYPES}

    def problem(self, lack: str) -> str:
        """Return an error for the setting; ``lack`` says why TransformerEngine is not available."""
        need = f"{self.setting} needs TransformerEngine ({self.reason}), {lack}"
        install = "" if lack == RULED_OUT else f"install it ({PAGE}) or "
        return f"{need}; {install}{self.otherwise}"

    def warning(self, lack: str) -> str:
        """Return a warning; ``lack`` says why TransformerEngine is not available."""
        return f"{self.setting} uses TransformerEngine ({self.reason}), {lack}: {self.otherwise}"


MEGATRON_OPTIONS = {
    "apply_rope_fusion": "its kernel rotates queries and keys",
    "attention_backend": "it has attention of this kind",
    "cp_comm_type": "its attention exchanges rows this way",
    "delay_wgrad_compute": "its linear layers put off the gradients of weights",
    "fp4": "its linear layers compute in FP4",
    "fp8": "its linear layers compute in FP8",
    "fused_single_qkv_rope": "its kernel rotates queries and keys together",
    "log_max_attention_logit": "its attention reports the largest logit",
    "moe_router_fusion": "its kernel routes tokens",
    "qk_clip": "its attention reports the largest logit",
    "symmetric_ar_type": "its linear layers reduce in symmetric memory",
    "tp_comm_overlap": "its linear layers overlap communication with computation",
    "use_te_activation_func": "it has the activation",
}
"""Fields that Megatron-core's modules without TransformerEngine ignore or reject, and why."""
_OFF = (False, None, "auto", "none", "local", "flash")
"""Values of such a field that do not need TransformerEngine.

FlashAttention is available without it.
"""


def needs_transformer_engine(config: Config) -> tuple[Need, ...]:
    """Return the settings that use TransformerEngine, for any model: first those that require it."""
    return needs(config, None)


def needs(config: Config, fields: MegatronFields | None) -> tuple[Need, ...]:
    """Like ``needs_transformer_engine``, for the model with these fields of TransformerConfig."""
    found = [
        *_of_optimizer(config.optimizer),
        *_of_model(config.perf, fields),
        *_of(config.megatron.options),
    ]
    return tuple(sorted(found, key=lambda need: not need.is_required))


def _of_optimizer(optimizer: OptimizerConfig) -> Iterable[Need]:
    """Settings of the optimizer.

    HybridDeviceOptimizer (host memory) stores float32 and does not need it.
    """
    if not optimizer.use_precision_aware_optimizer or optimizer.optimizer_cpu_offload:
        return
    for name in OPTIMIZER_TYPES:
        dtype = getattr(optimizer, name)
        if dtype != "fp32":
            yield Need(
                f"{flag(name)} {dtype}",
                "its Adam keeps other types than float32",
                f"give {flag(name)} fp32",
                is_required=True,
            )


def _of_model(perf: PerfConfig, fields: MegatronFields | None) -> Iterable[Need]:
    """Settings of kernels; those of experts are ignored for a dense model."""
    if fields is None or "num_moe_experts" in fields:
        yield from _of_experts(perf, has_experts=fields is not None)
    if not perf.no_rope_fusion and not (fields or {}).get("rotary_interleaved"):
        yield Need(
            "--no-rope-fusion false",
            "its kernel rotates queries and keys",
            "without it each layer waits for the GPU to read the lengths of the sequences",
            is_required=False,
        )


def _of_experts(perf: PerfConfig, *, has_experts: bool) -> Iterable[Need]:
    one_by_one = "the experts of a rank then run one after the other, which is several times slower"
    if perf.moe_grouped_gemm:
        yield Need(
            "--moe-grouped-gemm true",
            "its kernel computes the experts of a rank together",
            f"give --moe-grouped-gemm false: {one_by_one}",
            is_required=True,
        )
    elif perf.moe_grouped_gemm is None and has_experts:
        yield Need(
            "--moe-grouped-gemm, not given",
            "its kernel computes the experts of a rank together",
            one_by_one,
            is_required=False,
        )
    if perf.moe_permute_fusion:
        yield Need(
            "--moe-permute-fusion true",
            "its kernel sorts tokens by expert",
            "give --moe-permute-fusion false: torch then sorts them, in more kernels and with more memory",
            is_required=True,
        )


def _of(megatron: Mapping[str, object]) -> Iterable[Need]:
    for name, reason in MEGATRON_OPTIONS.items():
        value = megatron.get(name)
        if value in _OFF:
            continue
        yield Need(f"{flag(name)} {value_text(value)}", reason, "leave it out", is_required=True)
