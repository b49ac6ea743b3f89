"""Check that every pass of the policy computes the same policy.

The loss compares log-probs of several passes: those of the engines, of the old policy and the
reference without gradients, and of the training pass with them. A pass that draws random numbers,
or one that computes otherwise in training mode, makes them log-probs of other policies. SFT has one
pass, and may have either.

Input: a ``Config``. Output: one line for each problem. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import spelled, value_text

DIFFERS = {
    "moe_expert_capacity_factor": "which tokens an expert drops depends on the rest of a micro-batch",
    "moe_input_jitter_eps": "each pass multiplies the input of the routers by other random numbers",
    "moe_router_force_load_balancing": "each pass chooses experts at random",
    "flash_decode": "passes without gradients have other attention kernels than the training pass",
    "use_inference_optimized_layers": (
        "passes without gradients have other layers than the training pass"
    ),
}
"""Options of Megatron-core with which passes over the same tokens differ, and why."""
_SAMPLING = (
    "engines sample with values that the trainer does not know; use --rollout-temperature, --rollout-top-p and "
    "--rollout-top-k"
)
_DRAFTED = "engines accept drafted tokens that the policy would not have sampled"
SAMPLES: Mapping[str, tuple[object, str]] = {
    "allow_auto_truncate": (
        False,
        "engines answer the beginning of a long prompt, and the trainer reads all of it",
    ),
    "preferred_sampling_params": (None, _SAMPLING),
    "speculative_accept_threshold_acc": (1.0, _DRAFTED),
    "speculative_accept_threshold_single": (1.0, _DRAFTED),
}
"""Arguments of SGLang with which answers are not those of the policy to a prompt: the value with which
they are, and why."""


def pass_problems(config: Config) -> list[str]:
    """Return settings with which two passes over the same tokens give different log-probs."""
    if config.grpo.is_supervised:
        return []
    loss = spelled(config, "loss_type")
    problems = []
    if config.lora.lora_rank is not None and config.lora.lora_dropout:
        problems.append(
            f"{spelled(config, 'lora_dropout')} with {loss}, which compares the log-probs of the training pass with "
            "those of engines and of passes without dropout; use --lora-dropout 0"
        )
    for name, reason in DIFFERS.items():
        value = config.megatron.options.get(name)
        if value:
            problems.append(
                f"{flag(name)} {value_text(value)} with {loss}, which compares the log-probs of several passes: "
                f"{reason}; leave it out"
            )
    debug = config.debug
    trains_on_answers = config.generates and not (debug.debug_rollout_only or debug.debug_eval_only)
    for name, (allowed, reason) in SAMPLES.items():
        value = config.sglang.server_args.get(name, allowed)
        if value != allowed and trains_on_answers:
            problems.append(
                f"{flag(f'sglang_{name}')} {value_text(value)} with {loss}: {reason}; leave it out"
            )
    return problems
