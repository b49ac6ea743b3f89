"""Check the table [lora]: what adapters exclude, and engines that load adapters beside the base.

Input: a ``Config``, the content of the model's config.json. Output: one line for each problem. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpost.config.engine_args import MODULES, adapter_args
from rlpost.config.tree import Config
from rlpost.config.wording import spelled
from rlpost.models.families import family_of
from rlpost.models.model_types import EXPERT_KEYS, HfConfig

ATTENTION = ("linear_qkv", "linear_proj")
"""Targets that are projections of attention."""


def lora_problems(config: Config) -> list[str]:
    """Settings that adapters exclude."""
    if config.lora.lora_rank is None:
        return []
    lora, rank = config.lora, spelled(config, "lora_rank")
    rules = [
        (
            config.grpo.enable_mtp_training,
            f"--enable-mtp-training true with {rank}: the layer for multi-token prediction has no adapters; use "
            "--enable-mtp-training false or --lora-rank none",
        ),
        (
            bool(config.megatron.options.get("moe_shared_expert_overlap")),
            f"--moe-shared-expert-overlap true with {rank}: adapters communicate inside their layer, which Megatron "
            "then calls with gathered rows; omit it or use --lora-rank none",
        ),
        (
            config.use_critic,
            f"--advantage-estimator ppo with {rank}: the critic trains all of its weights and has no adapters; use "
            "another estimator, or --lora-rank none",
        ),
        (
            config.grpo.ref_update_interval is not None,
            f"{spelled(config, 'ref_update_interval')} with {rank}: the reference is the base, which never changes; "
            "omit one of them",
        ),
        (
            config.grpo.keep_old_actor,
            f"--keep-old-actor true with {rank}: the old policy would be kept without its adapters; use "
            "--keep-old-actor false",
        ),
        (
            config.rollout.update_weights_interval > 1,
            f"{spelled(config, 'update_weights_interval')} with {rank}: the policy of the engines would be kept "
            "without its adapters; use --update-weights-interval 1",
        ),
        (
            len(set(lora.lora_targets)) != len(lora.lora_targets),
            f"{spelled(config, 'lora_targets')} names a target twice; name each once",
        ),
        (
            lora.lora_export == "peft" and "experts" in lora.lora_targets,
            f"--lora-export peft with {spelled(config, 'lora_targets')}: transformers stores the routed experts of a "
            "layer in one tensor, which an adapter of PEFT for a linear layer does not fit; use --lora-export merged, "
            "or --lora-targets without experts",
        ),
        (
            lora.lora_export == "peft" and config.checkpoint.save_hf is None,
            "--lora-export peft without --save-hf: nothing is exported; add --save-hf, or omit --lora-export",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def lora_model_problems(config: Config, model: HfConfig) -> list[str]:
    """Architectures without adapters, and targets that the model of this config.json lacks."""
    if config.lora.lora_rank is None:
        return []
    known = family_of(model)
    if known is not None and not known.adapters:
        return [
            f"{spelled(config, 'lora_rank')}: adapters do not exist for the attention or the experts of "
            f"{model['architectures'][0]}; omit it to train all weights"
        ]
    targets = config.lora.lora_targets
    if any(model.get(key) for key in EXPERT_KEYS):
        if config.lora.lora_export == "merged" or set(targets) <= {*ATTENTION, "experts"}:
            return []
        return [
            f"--lora-export peft with {spelled(config, 'lora_targets')}: in a model with routed experts PEFT takes "
            "adapters of gate, up and down projections for those of the experts, and drops the ones of dense layers "
            "and shared experts with a warning; use --lora-targets linear_qkv linear_proj, or --lora-export merged"
        ]
    if "experts" not in targets:
        return []
    return [
        f"{spelled(config, 'lora_targets')}: the model's config.json has no routed experts; use --lora-targets without "
        "experts"
    ]


ADAPTER = "--update-weight-mode adapter"
DRAFTING = ("NGRAM", "EAGLE", "NEXTN", "EAGLE3", "DFLASH", "DSPARK")
"""Algorithms of speculative decoding that SGLang combines with adapters.

Source: sglang/srt/arg_groups/lora_hook.py.
"""


def adapter_engine_problems(config: Config) -> list[str]:
    """Settings that exclude adapters in engines."""
    if not config.sends_adapters:
        return []
    if config.lora.lora_rank is None:
        return [f"{ADAPTER} without --lora-rank: there is no adapter; add --lora-rank, or use "
                "--update-weight-mode full"]  # fmt: skip
    return [*_run_problems(config), *_server_problems(config)]


def _run_problems(config: Config) -> list[str]:
    checkpoint = config.checkpoint
    other_targets = [one for one in config.lora.lora_targets if one not in MODULES]
    rules = [
        (
            config.sync.update_weight_transport != "disk",
            f"{ADAPTER} with {spelled(config, 'update_weight_transport')}: engines load adapters "
            "from a folder; use --update-weight-transport disk, or --update-weight-mode full",
        ),
        (
            config.cluster.colocate,
            f"{ADAPTER} with --colocate true: engines read the trainer's GPU memory, so nothing is "
            "sent, and offloaded engines need all weights again; use --update-weight-mode full "
            "with --update-weight-transport memory",
        ),
        (
            config.offload_rollout and not config.cluster.colocate,
            f"{ADAPTER} with --offload-rollout true: engines release the base with their weights, "
            "and no update sends it again; use --offload-rollout false, or "
            "--update-weight-mode full",
        ),
        (
            bool(other_targets),
            f"{ADAPTER} with {spelled(config, 'lora_targets')}: a PEFT folder cannot hold adapters "
            "of routed experts, which transformers stores in one tensor a layer; use "
            "--update-weight-mode full, or --lora-targets without experts",
        ),
        (
            checkpoint.ref_load is not None and checkpoint.ref_load != checkpoint.hf_checkpoint,
            f"{ADAPTER} with {spelled(config, 'ref_load')}: engines read the base from "
            "--hf-checkpoint, and no update sends it; omit --ref-load, give the base as "
            "--hf-checkpoint, or use --update-weight-mode full",
        ),
        (
            bool(config.sglang.rollout_external_engine_addrs),
            f"{ADAPTER} with {spelled(config, 'rollout_external_engine_addrs')}: SGLang gives a "
            "request no adapter by default, and waits for ever for aborted ones when an adapter "
            "is unloaded; only engines that the run starts do neither. Use --rollout-num-gpus, "
            "or --update-weight-mode full",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _server_problems(config: Config) -> list[str]:
    """Options of SGLang."""
    server_args = config.sglang.server_args
    algorithm, workers = (
        server_args.get("speculative_algorithm"),
        server_args.get("tokenizer_worker_num", 1),
    )
    problems = [
        f"--sglang-{name.replace('_', '-')}: this follows from --lora-rank and --lora-targets with "
        f"{ADAPTER}; leave it out"
        for name in ("lora_paths", *adapter_args(config))
        if name in server_args
    ]
    rules = [
        (
            config.sglang.shares_attention,
            f"--sglang-enable-dp-attention with {ADAPTER}: SGLang then keeps a slot without an "
            "adapter beside pinned ones, which engines here do not; leave it out, or use "
            "--update-weight-mode full",
        ),
        (
            workers > 1,
            f"--sglang-tokenizer-worker-num {workers} with {ADAPTER}: each process "
            "has its own list of adapters, and a request to load one reaches only one process; use 1",
        ),
        (
            algorithm is not None and str(algorithm).upper() not in DRAFTING,
            f"--sglang-speculative-algorithm {algorithm} with {ADAPTER}: SGLang combines adapters "
            f"with {', '.join(DRAFTING)} alone; use one of them, or --update-weight-mode full",
        ),
    ]
    return problems + [problem for is_broken, problem in rules if is_broken]


def adapter_engine_model_problems(config: Config, model: Mapping[str, Any]) -> list[str]:
    """Models whose layers or weights engines cannot combine with adapters."""
    if not config.sends_adapters or config.lora.lora_rank is None:
        return []
    problems = []
    if "vision_config" in model:
        problems.append(
            f"{ADAPTER}: engines are not tested with adapters of {model['architectures'][0]}, whose encoder of "
            "images has linear layers too; use --update-weight-mode full"
        )
    method = (model.get("quantization_config") or {}).get("quant_method")
    if method is not None:
        problems.append(
            f"{ADAPTER}: --hf-checkpoint has {method} weights, which are the base of the engines, "
            "but the trainer's base is in its own precision; use a checkpoint in bf16, or "
            "--update-weight-mode full with --update-weight-transport memory"
        )
    has_experts = any(model.get(key) for key in EXPERT_KEYS)
    if has_experts and any(target not in ATTENTION for target in config.lora.lora_targets):
        problems.append(
            f"{ADAPTER} with {spelled(config, 'lora_targets')}: in a model with routed experts "
            "SGLang takes adapters of gate, up and down projections for those of the experts; use "
            "--lora-targets linear_qkv linear_proj, or --update-weight-mode full"
        )
    return problems
