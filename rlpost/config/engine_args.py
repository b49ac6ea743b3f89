"""Arguments of an engine's server that follow from settings of the run. Pure.

Input: the tree. Output: fields of SGLang's ``ServerArgs``, the same for the run's own engines and
for those of its fleet.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlpost.config.tree import Config

MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""SGLang's names of the linear layers of each target of --lora-targets."""


DTYPE = "dtype"
IMAGE_ARGS: Mapping[str, object] = {
    "enable_multimodal": True,
    # as the trainer's (rlpost.images.processor)
    "image_processor_backend": "pil",
}


def engine_args(config: Config) -> dict[str, object]:
    """Return the arguments, without those that the user passes to SGLang."""
    dtype = engine_dtype(config.perf.bf16)
    args: dict[str, object] = {} if dtype is None else {DTYPE: dtype}
    if config.grpo.use_rollout_routing_replay:
        args["enable_return_routed_experts"] = True
    if config.records_tokens:
        args["incremental_streaming_output"] = True
    if config.takes_images:
        args |= IMAGE_ARGS
        if config.offload_rollout:
            args["enable_weights_cpu_backup"] = True  # no update sends the encoder of images
    if loses_draft_weights(config):
        args["enable_draft_weights_cpu_backup"] = True
    return args | adapter_args(config) if config.sends_adapters else args


def loses_draft_weights(config: Config) -> bool:
    """Return whether engines release weights of a draft model that no update brings back.

    An offload releases them with the engine's own; only a trained layer of the model is sent.
    """
    args = config.sglang.server_args
    algorithm = args.get("speculative_algorithm")
    has_weights = algorithm is not None and str(algorithm).upper() != "NGRAM"
    is_own = args.get("speculative_draft_model_path") is None
    is_kept = args.get("enable_weights_cpu_backup")
    is_sent = config.grpo.enable_mtp_training and is_own
    return bool(has_weights and config.offload_rollout and not is_sent and not is_kept)


def engine_dtype(bf16: bool | None) -> str | None:
    """Return the dtype of the trainer's weights; None: the engine decides as ``weight_dtype``.

    SGLang's own choice follows config.json: float16 for a checkpoint in float32 or without a dtype.
    """
    if bf16 is None:
        return None
    return "bfloat16" if bf16 else "float32"


def adapter_args(config: Config) -> dict[str, object]:
    """Return the arguments of an engine that loads adapters, one at a time.

    A name in the adapter that the model lacks is an error (``lora_strict_loading``).
    """
    lora = config.lora
    return {
        "enable_lora": True,
        "max_lora_rank": lora.lora_rank,
        "lora_target_modules": [
            name for target in lora.lora_targets for name in MODULES.get(target, ())
        ],
        "max_loras_per_batch": 1,
        "max_loaded_loras": 1,
        "lora_strict_loading": True,
    }
