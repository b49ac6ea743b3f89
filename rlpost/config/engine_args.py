"""Arguments and variables of an engine's server that follow from settings of the run. Pure.

Input: the tree. Output: fields of SGLang's ``ServerArgs`` and environment variables, the same for
the run's own engines and for those in other jobs.
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


FEATURE_CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
"""MB of features of images that an engine keeps, by the hash of the image alone. SGLang 0.5.21
(``managers/mm_schedule.py``) clears them neither after a weight update nor with /flush_cache.
"""


def engine_variables(config: Config) -> dict[str, str]:
    """Return the environment variables of an engine whose value the run decides.

    An update of the encoder must reach all images, so engines then keep no features.
    """
    return {FEATURE_CACHE: "0"} if config.trains_encoder else {}


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
    is_kept = args.get("enable_weights_cpu_backup")
    is_lost = config.offload_rollout and not sends_draft_weights(config)
    return bool(has_weights and is_lost and not is_kept)


def sends_draft_weights(config: Config) -> bool:
    """Return whether updates have the weights of a draft model: of the model's own trained layer.

    Any other draft model has different weights under the policy's names, such as ``model.norm`` of
    an EAGLE-3 checkpoint, and must not get the policy's.
    """
    is_own = config.sglang.server_args.get("speculative_draft_model_path") is None
    return config.grpo.enable_mtp_training and is_own


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


def replicas(config: Config) -> int:
    """Data-parallel replicas of attention in an engine: fewer GPUs shard each one."""
    args = config.sglang.server_args
    return int(args.get("dp_size", 1)) if args.get("enable_dp_attention") else 1


def attention_gpus(config: Config) -> int:
    """GPUs of an engine that share an attention replica."""
    return max(1, config.cluster.rollout_num_gpus_per_engine // replicas(config))
