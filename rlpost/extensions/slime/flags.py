"""Flags of slime and Megatron-LM that rlpost does not have, and what to use instead. Pure.

A sentence that begins with "remove it: " is the reason why the flag has no effect here; a command
line with it is accepted with that note. All other flags of slime at 624b824 (21 August 2026) are
settings here, or options that are passed through to SGLang and Megatron-core. A test compares the
list of slime's flags with both.
"""

from __future__ import annotations

from rlpost.config.other_flags import TEACHER, TEACHER_IN_TRAINER
from rlpost.extensions.slime.megatron_flags import ACCEPTED, REFUSED

_ALWAYS = "remove it: rlpost always does this"
_NO_HOOK = "rlpost calls no user code at this point"
_LATEST = "rlpost always loads one checkpoint; give its folder"
_SERVICE = "it belongs to slime's rollout-buffer service; use --custom-generate-function-path"
_ROUTER = "there is no router: the driver sends each request to the engine that it chooses"
_OF_ITS_TESTS = "it belongs to slime's own tests"
_DEEPGEMM = (
    "use --fp8 with --fp8-recipe; engines generate in FP8 with an --hf-checkpoint in FP8 blocks"
)

LACKING: dict[str, str] = {
    "allgather-cp": "context parallelism here always balances causal attention over the ranks",
    "balance-by-flops": "use --balance-data, which counts attention as well",
    "check-weight-update-equal": "every engine's version is checked after each update; "
    "for equal tensors see `rlpost doctor`, where installed",
    "ci-disable-kl-checker": f"{_OF_ITS_TESTS}; here --guard-initial-kl stops a run",
    "ci-load-grad-norm": _OF_ITS_TESTS,
    "ci-save-grad-norm": f"{_OF_ITS_TESTS}; train/grad_norm is in metrics.jsonl",
    "ci-test": _OF_ITS_TESTS,
    "ci-train-rollout-logprob-abs-diff-threshold": "use --guard-rollout-logprob-diff",
    "custom-config-path": "functions of slime get the settings of the run; "
    "read a file of your own in the function",
    "custom-convert-samples-to-train-data-path": f"{_NO_HOOK}; use "
    "--custom-generate-function-path for the samples and --custom-advantage-function-path for "
    "their advantages",
    "custom-eval-rollout-log-function-path": f"{_NO_HOOK}; metrics.jsonl has every metric",
    "custom-megatron-before-log-prob-hook-path": _NO_HOOK,
    "custom-megatron-before-train-step-hook-path": _NO_HOOK,
    "custom-megatron-init-path": _NO_HOOK,
    "custom-model-provider-path": "a model is described by a family (docs/extending.md)",
    "custom-pg-loss-reducer-function-path": "use --calculate-per-token-loss, or "
    "--loss-type custom_loss with --custom-loss-function-path",
    "custom-rollout-log-function-path": f"{_NO_HOOK}; metrics.jsonl has every metric",
    "custom-tis-function-path": "use --tis-level, --tis-mode, --tis-clip and --tis-clip-low, or "
    "--loss-type custom_loss",
    "custom-update-weight-post-write-path": f"{_NO_HOOK}; "
    "--update-weight-disk-dir must be on a shared POSIX file system",
    "data-pad-size-multiplier": "remove it: micro-batches are packed without padding",
    "data-source-path": "prompts come from --prompt-data, JSON Lines or Parquet (docs/data.md)",
    "disable-rollout-global-dataset": "prompts always come from --prompt-data",
    "disable-wandb-random-suffix": "remove it: the run in Weights & Biases has the run's own name",
    "distributed-backend": "remove it: nccl on GPUs, gloo without",
    "dump-details": "use --save-debug-rollout-data and --trace-steps",
    "fetch-trajectory-retry-times": _SERVICE,
    "freeze-indexer": "rlpost has no family with such an indexer",
    "get-mismatch-metrics": "remove it: train/rollout_kl and train/rollout_ratio are always "
    "computed",
    "http-proxy": "engines are reached directly; set proxies for other programs with --environment",
    "load-debug-rollout-data-subsample": "record fewer prompts with --rollout-batch-size",
    "load-forge-rollout-data": "use --load-debug-rollout-data with recordings of rlpost",
    "log-correct-samples": "report/samples.jsonl has answers with their rewards",
    "log-multi-turn": "remove it: metrics count the tokens of all turns",
    "log-passrate": "remove it: eval/SET/pass@K is always computed",
    "log-reward-category": "return the reward alone, or record categories in your reward function",
    "loss-mask-type": "remove it: the mask comes from the tokenizer's own chat template",
    "megatron-config-path": "use flags or a recipe; the critic has --critic-load and --critic-lr",
    "megatron-deepgemm-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-forward-modules": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-layers": _DEEPGEMM,
    "megatron-deepgemm-moe-forward-modules": _DEEPGEMM,
    "memory-recorder": "use --record-memory-history, torch's own recorder",
    "memory-snapshot-dir": "use --record-memory-history, which writes RUN/traces",
    "memory-snapshot-num-steps": "use --profile-step-start and --profile-step-end",
    "min-batch-collection-ratio": _SERVICE,
    "model-name": "remove it: the family is that of config.json in --hf-checkpoint",
    "offload": "use --offload-train --offload-rollout",
    "opd-teacher-ckpt-step": f"{TEACHER}; convert its checkpoint first (`rlpost convert`, where installed)",
    "opd-teacher-load": TEACHER_IN_TRAINER,
    "padded-vocab-size": "remove it: the vocabulary is padded for --tensor-model-parallel-size",
    "prefill-num-servers": "rlpost starts engines that prefill and decode; "
    "give others with --rollout-external-engine-addrs",
    "profile-target": "use --profile for the trainer and --trace-steps for all processes",
    "qwen-gdn-backend": "kernels of fla-core where they are installed (docs/models.md)",
    "recompute-loss-function": "use --log-probs-chunk-size, which bounds the memory of the loss",
    "ref-ckpt-step": f"{_LATEST} as --ref-load",
    "release-train": "use --offload-train, which keeps the trainer's processes",
    "reset-optimizer-states": "the optimizer keeps its state; --no-save-optim drops it at a resume",
    "rollout-all-samples-process-path": f"{_NO_HOOK}; use --save-debug-rollout-data",
    "rollout-buffer-url": _SERVICE,
    "rollout-data-postprocess-path": f"{_NO_HOOK}; use --custom-generate-function-path, which sets "
    "the loss mask",
    "rollout-data-transport": "remove it: batches go through Ray's object store",
    "rollout-health-check-first-wait": "use --bringup-deadline-s, the time engines have to start",
    "rollout-sample-filter-path": "use --custom-generate-function-path, which sets the loss mask",
    "rollout-sample-hook-path": "use --custom-generate-function-path, which returns the sample",
    "rollout-skip-special-tokens": "remove it: rewards get text without special tokens, training "
    "the exact tokens",
    "rollout-task-type": _SERVICE,
    "save-debug-train-data": "use --save-debug-rollout-data; --debug-train-only repeats the step",
    "sglang-config": "every engine has the same options, the keys of [sglang]",
    "sglang-router-ip": _ROUTER,
    "sglang-router-port": _ROUTER,
    "sglang-router-request-timeout-secs": _ROUTER,
    "start-rollout-id": "a run continues from its newest checkpoint; use --load for another one",
    "tb-experiment-name": "use --tensorboard-dir",
    "tb-project-name": "use --tensorboard-dir",
    "train-backend": "remove it: the trainer is Megatron-core",
    "train-env-vars": "use --environment NAME=VALUE",
    "update-weight-delta-checksum": "remove it: an update holds all weights, or all adapters",
    "update-weight-delta-encoding": "remove it: an update holds all weights, or all adapters",
    "update-weight-disk-keep-files": "files of an update are removed once all engines have read "
    "them; keep weights with --save-hf",
    "update-weight-local-checkpoint-dir": "engines read the files of an update where they are "
    "written, --update-weight-disk-dir",
    "use-distributed-post": "remove it: requests are sent by the driver (docs/scale.md has the "
    "limits)",
    "use-fault-tolerance": _ALWAYS + ": dead engines are restarted",
    "use-rollout-entropy": "remove it: train/entropy is always computed",
    "use-stateless-adam": "use --no-save-optim, which drops the moments at a resume",
    "wandb-always-use-train-step": _ALWAYS + ": the step of every metric is the training step",
    "wandb-dir": "remove it: Weights & Biases writes to RUN/wandb",
    "wandb-run-id": "remove it: a run keeps its identity across attempts",
}
"""Name without leading dashes -> a sentence that follows "no such flag; "."""

REMOVE = "remove it: "
"""How ``LACKING`` marks a flag that needs no replacement."""


def without_effect(name: str) -> str | None:
    """Return why a flag, without dashes, changes nothing here; None for others."""
    text = LACKING.get(name, "")
    return text.removeprefix(REMOVE) if text.startswith(REMOVE) else ACCEPTED.get(name)


def answer_to(word: str) -> str | None:
    """Return an error for a flag of one of them, with what to use instead; None for other words."""
    name = word.lstrip("-").replace("_", "-").lower()
    for program, table in (("slime", LACKING), ("Megatron-LM", REFUSED)):
        if name in table:
            return f"{word}: a flag of {program} that rlpost does not have; {table[name]}"
    return None
