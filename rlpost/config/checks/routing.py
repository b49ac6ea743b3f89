"""Check the settings of routing replay: a mixture of experts, and a router that can be replayed.

Input: a ``Config`` and, if available, the model's ``config.json``.
Output: one line for each problem. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.config.checks.layout import EXPERT_KEYS
from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled, value_text

REPLAY = ("use_rollout_routing_replay", "use_routing_replay")
_CONFLICTS = {
    "moe_router_fusion": ((False,), "its kernel chooses the experts itself"),
    "cuda_graph_impl": (("none",), "a captured graph repeats the routes of its capture"),
    "enable_cuda_graph": ((False,), "a captured graph repeats the routes of its capture"),
    "external_cuda_graph": ((False,), "a captured graph repeats the routes of its capture"),
    "moe_expert_capacity_factor": ((None,), "an expert at its capacity drops tokens that were routed to it"),
}
"""Options of Megatron-core with which routes cannot be replayed: the values that are allowed, and why."""


def routing_problems(config: Config) -> list[str]:
    """Settings that conflict with routing replay."""
    given = _given(config)
    if not given:
        return []
    flags = listed([spelled(config, name) for name in given], "and")
    off = " ".join(f"{flag(name)} false" for name in given)
    problems = []
    for name, (allowed, reason) in _CONFLICTS.items():
        value = config.megatron.options.get(name, allowed[0])
        if value not in allowed:
            problems.append(f"{flag(name)} {value_text(value)} with {flags}: {reason}; leave it out, or use {off}")
    if config.grpo.loss_type == "sft_loss" and config.grpo.use_rollout_routing_replay:
        problems.append(
            "--loss-type sft_loss with --use-rollout-routing-replay true: no engine routes the tokens; use "
            "--use-rollout-routing-replay false"
        )
    return problems


def routing_model_problems(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Routing replay for a model without experts."""
    given = _given(config)
    if not given or any(key in hf_config for key in EXPERT_KEYS):
        return []
    off = " ".join(f"{flag(name)} false" for name in given)
    return [f"{listed([spelled(config, name) for name in given], 'and')}: the model has no experts; use {off}"]


def _given(config: Config) -> list[str]:
    return [name for name in REPLAY if getattr(config.grpo, name)]
