"""Check the settings of routing replay, on the side of the trainer and on the side of the engines.

Input: a ``Config`` and, if available, the model's ``config.json``.
Output: one line for each problem. Pure.

The trainer needs a mixture of experts whose router can be replayed. The engines must return the
experts that they chose: SGLang 0.5.23 (``srt/state_capturer``) writes the choice of each layer to a
buffer indexed by row of the batch, then to a table indexed by slot of the KV cache, and reads that
table when a request ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled, value_text
from rlpost.models.model_types import EXPERT_KEYS

REPLAY = ("use_rollout_routing_replay", "use_routing_replay")

_Conflicts = Mapping[str, tuple[tuple[object, ...], str]]
"""By option: the values that are allowed, and the reason why other values are not."""

_GRAPH_REASON = "a captured graph repeats the routes of its capture"
_MEGATRON_CONFLICTS: _Conflicts = {
    "moe_router_fusion": ((False,), "its kernel chooses the experts itself"),
    "cuda_graph_impl": (("none",), _GRAPH_REASON),
    "enable_cuda_graph": ((False,), _GRAPH_REASON),
    "external_cuda_graph": ((False,), _GRAPH_REASON),
    "moe_expert_capacity_factor": (
        (None,),
        "an expert at its capacity drops tokens that were routed to it",
    ),
}

_HOST_CACHE_REASON = "a prefix loaded from host memory has the routes of other tokens"
_SGLANG_CONFLICTS: _Conflicts = {
    "speculative_algorithm": ((None,), "SGLang's buffer of routes has no rows for draft tokens"),
    "enable_hierarchical_cache": ((False,), _HOST_CACHE_REASON),
    "enable_lmcache": ((False,), "a prefix loaded from LMCache has the routes of other tokens"),
    "disaggregation_mode": (("null",), "the decode engine does not have the routes of the prompt"),
    "enable_two_batch_overlap": (
        (False,),
        "the second half of a batch overwrites the routes of the first",
    ),
    "tokenizer_worker_num": ((1,), "requests ask for routes through one process"),
}
_OPAQUE_BACKENDS = (
    "triton_kernel",
    "flashinfer_trtllm",
    "experimental_sgl_trtllm",
    "flashinfer_mxfp4",
)
"""Values of ``moe_runner_backend`` whose kernels choose the experts themselves.

Source: ``srt/layers/moe/topk.py``.
"""


def routing_problems(config: Config) -> list[str]:
    """Return settings that conflict with routing replay."""
    problems = _trainer_problems(config)
    if config.grpo.use_rollout_routing_replay:
        problems += _engine_problems(config)
    return problems


def routing_model_problems(config: Config, hf_config: Mapping[str, object]) -> list[str]:
    """Return a problem if routing replay is set for a model without experts."""
    enabled = _enabled(config)
    if not enabled or any(key in hf_config for key in EXPERT_KEYS):
        return []
    return [
        f"{_settings_text(config, enabled)}: the model has no experts; use {_disable_text(enabled)}"
    ]


def _trainer_problems(config: Config) -> list[str]:
    enabled = _enabled(config)
    if not enabled:
        return []
    settings, disable = _settings_text(config, enabled), _disable_text(enabled)
    problems = []
    for name, (allowed, reason) in _MEGATRON_CONFLICTS.items():
        value = config.megatron.options.get(name, allowed[0])
        if value not in allowed:
            problems.append(
                _conflict(f"{flag(name)} {value_text(value)}", settings, reason, disable)
            )
    if config.grpo.is_supervised and config.grpo.use_rollout_routing_replay:
        problems.append(
            "--loss-type sft_loss with --use-rollout-routing-replay true: no engine routes the tokens; use "
            "--use-rollout-routing-replay false"
        )
    return problems


def _engine_problems(config: Config) -> list[str]:
    """Return settings of the engines with which no routes, or wrong ones, are returned."""
    server_args = config.sglang.server_args
    conflicts = []
    for name, (allowed, reason) in _SGLANG_CONFLICTS.items():
        value = server_args.get(name, allowed[0])
        if value not in allowed:
            conflicts.append((f"{flag(f'sglang_{name}')} {value_text(value)}", reason))
    backend = server_args.get("moe_runner_backend")
    if backend in _OPAQUE_BACKENDS:
        setting = f"--sglang-moe-runner-backend {value_text(backend)}"
        conflicts.append((setting, "its kernel chooses the experts and does not return them"))
    settings, disable = "--use-rollout-routing-replay true", "--use-rollout-routing-replay false"
    return [_conflict(setting, settings, reason, disable) for setting, reason in conflicts]


def _conflict(setting: str, replay_settings: str, reason: str, disable: str) -> str:
    return f"{setting} with {replay_settings}: {reason}; leave it out, or use {disable}"


def _enabled(config: Config) -> list[str]:
    return [name for name in REPLAY if getattr(config.grpo, name)]


def _settings_text(config: Config, names: list[str]) -> str:
    return listed([spelled(config, name) for name in names], "and")


def _disable_text(names: list[str]) -> str:
    return " ".join(f"{flag(name)} false" for name in names)
