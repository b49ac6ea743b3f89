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
from rlpost.config.sglang_variables import VARIABLES, is_default
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
_QUANTISED = (
    "updates bring the trainer's weights, which such engines do not quantise again; engines read the quantisation of "
    "--hf-checkpoint, such as one in FP8 blocks, from its config.json"
)
SAMPLES: Mapping[str, tuple[object, str]] = {
    "allow_auto_truncate": (
        False,
        "engines answer the beginning of a long prompt, and the trainer reads all of it",
    ),
    "debug_tensor_dump_input_file": (None, "engines answer the prompt of that file, and end"),
    "delete_ckpt_after_loading": (
        False,
        "an engine deletes the model folder, from which trainer, exports and restarted engines read",
    ),
    "dllm_algorithm": (None, "engines do not sample one token after the other"),
    "enable_hisparse": (False, "engines attend to a part of the context"),
    "enable_mamba_cache_stochastic_rounding": (False, "engines round states at random"),
    "enable_strict_thinking": (False, "engines exclude tokens while they think"),
    "forward_hooks": (None, "code in the engines changes what their layers compute"),
    "kt_weight_path": (None, "engines read experts from that folder, and no update replaces them"),
    "modelopt_quant": (None, _QUANTISED),
    "preferred_sampling_params": (None, _SAMPLING),
    "quantization": (None, _QUANTISED),
    "quantize_and_serve": (False, _QUANTISED),
    "rl_quant_profile": (None, _QUANTISED),
    "speculative_accept_threshold_acc": (1.0, _DRAFTED),
    "speculative_accept_threshold_single": (1.0, _DRAFTED),
}
"""Arguments of SGLang with which answers are not those of the policy to a prompt: the value with which
they are, and why."""


def pass_problems(config: Config) -> list[str]:
    """Return settings with which two passes over the same tokens give different log-probs."""
    variables = config.cluster.environment if config.generates else {}
    problems = [
        f"--environment {name}={variables[name]}: {reason}, so engines do not get it; leave it out"
        for name, (_, reason) in VARIABLES.items()
        if not is_default(name, variables.get(name, ""))
    ]
    if config.grpo.is_supervised:
        return problems
    loss = spelled(config, "loss_type")
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
