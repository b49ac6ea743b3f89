"""Check the engines' side of --use-rollout-routing-replay: settings with which no correct routes are returned.

Input: a ``Config``. Output: one line for each problem. Pure.

What SGLang 0.5.23 does, by its source (``srt/state_capturer``): each layer's choice is written to a buffer by row of
the batch, and from there to a table with a row for each slot of the KV cache, where the end of a request reads it.
"""

from __future__ import annotations

from typing import Any

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import spelled, value_text

_WITHOUT = "--use-rollout-routing-replay false"
_CONFLICTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "speculative_algorithm": ((None,), "SGLang's buffer of routes has no room for the tokens of a draft"),
    "enable_hierarchical_cache": ((False,), "a prefix that returns from host memory has the routes of other tokens"),
    "enable_lmcache": ((False,), "a prefix that returns from that cache has the routes of other tokens"),
    "disaggregation_mode": (("null",), "the engine that decodes does not have the routes of the prompt"),
    "enable_two_batch_overlap": ((False,), "the second half of a batch overwrites the routes of the first"),
    "tokenizer_worker_num": ((1,), "requests ask for routes through one process"),
}
"""Settings of SGLang: the values that are allowed, and why the others are not."""
_CHOOSE_INSIDE = ("triton_kernel", "flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4")
"""Values of ``moe_runner_backend`` whose kernels choose the experts themselves (``srt/layers/moe/topk.py``)."""


def route_problems(config: Config) -> list[str]:
    """Settings of the engines that conflict with the replay of their routes."""
    if not config.grpo.use_rollout_routing_replay:
        return []
    problems = []
    server_args = config.sglang.server_args
    for name, (allowed, reason) in _CONFLICTS.items():
        value = server_args.get(name, allowed[0])
        if value not in allowed:
            problems.append(_conflict(name, value, reason))
    backend = server_args.get("moe_runner_backend")
    if backend in _CHOOSE_INSIDE:
        problems.append(_conflict("moe_runner_backend", backend, "its kernel chooses experts and does not return them"))
    if config.sglang.rollout_external_engine_addrs:
        problems.append(
            f"{spelled(config, 'rollout_external_engine_addrs')} with --use-rollout-routing-replay true: the router "
            "does not pass the request for routes on, which engines of rlpost's own learn in another way; leave it "
            f"out, or use {_WITHOUT}"
        )
    return problems


def _conflict(name: str, value: Any, reason: str) -> str:
    own = f"{flag(f'sglang_{name}')} {value_text(value)}"
    return f"{own} with --use-rollout-routing-replay true: {reason}; leave it out, or use {_WITHOUT}"
