"""Flags of Megatron-LM's training program that are neither settings here nor fields. Pure data.

Names are those of core_v0.16.1 (megatron/training/arguments.py), without leading dashes.
"""

from __future__ import annotations

from rlpost.config.published_flags import SPEC

_ACCEPTED = {
    "a rotary embedding has no table, and the length is config.json's": (
        "max-position-embeddings no-position-embedding"
    ),
    "the vocabulary is padded for --tensor-model-parallel-size": "make-vocab-size-divisible-by",
    SPEC: "spec",
    "layers are always those of Megatron-core": "use-mcore-models use-flash-attn",
    "layers are TransformerEngine's on GPUs where it is installed, else Megatron's own, as with "
    "--lora-rank": "transformer-impl",
    "the tokenizer is the one of --hf-checkpoint": (
        "tokenizer-type tokenizer-model tokenizer-hf-use-fast vocab-extra-ids"
    ),
    "sequences are packed, up to --max-tokens-per-gpu": "seq-length encoder-seq-length",
    "prompts are read by the driver, not by a DataLoader": (
        "dataloader-type num-workers no-create-attention-mask-in-dataloader no-mmap-bin-files"
    ),
    "metrics of every step are in metrics.jsonl": (
        "log-interval log-throughput log-progress tensorboard-log-interval tensorboard-queue-size "
        "timing-log-level timing-log-option log-timers-to-tensorboard log-memory-to-tensorboard "
        "log-world-size-to-tensorboard no-log-loss-scale-to-tensorboard "
        "disable-log-loss-scale-to-tensorboard no-one-logger"
    ),
    "checkpoints are sharded, written and read in parallel": (
        "use-dist-ckpt ckpt-fully-parallel-save ckpt-fully-parallel-load auto-detect-ckpt-format "
        "ckpt-assume-constant-structure use-persistent-ckpt-worker"
    ),
}

_REFUSED = {
    "it belongs to Megatron-LM's own reinforcement learning; use the settings of [rollout] and "
    "[grpo]": (
        "perform-rl-step rl-prompts-per-eval grpo-prompts-per-step grpo-group-size grpo-iterations "
        "grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight "
        "grpo-filter-groups-with-same-reward rl-default-temperature rl-default-top-p "
        "rl-default-top-k rl-partial-rollouts rl-use-sequence-packing "
        "langrl-env-config langrl-external-server langrl-inference-server-conversation-template "
        "langrl-inference-server-type no-langrl-external-server "
        "no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle "
        "no-rl-offload-kv-cache-during-training no-rl-partial-rollouts "
        "no-rl-remove-kv-cache-during-training no-rl-reset-cuda-graphs no-rl-skip-bos-token "
        "no-rl-training-cuda-graphs no-rl-use-sequence-packing no-rl-verify-model-weights-swap "
        "refit-method rl-importance-sampling-truncation-coef "
        "rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size "
        "rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level "
        "rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size "
        "rl-offload-inference-model-weights-when-idle rl-offload-kv-cache-during-training "
        "rl-offload-optimizer-during-inference rl-parallel-generation-tasks "
        "rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-sequence-packing-algo "
        "rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token rl-training-cuda-graphs "
        "rl-verify-model-weights-swap "
    ),
    "a run has --num-rollout steps or --num-epoch epochs": (
        "train-iters train-samples iterations-to-skip"
    ),
    "the batch size is constant; use --global-batch-size": (
        "rampup-batch-size decrease-batch-size-if-needed"
    ),
    "use the flag that counts steps, --lr-decay-iters, --lr-wsd-decay-iters or --lr-warmup-iters": (
        "lr-decay-samples lr-wsd-decay-samples lr-warmup-samples"
    ),
    "use --eval-prompt-data and --n-samples-per-eval-prompt": (
        "eval-iters full-validation multiple-validation-sets"
    ),
    "use --prompt-data": (
        "data-path train-data-path valid-data-path test-data-path data-args-path split mock-data"
    ),
    "Slurm's signal ends a job with a checkpoint (docs/preemption.md)": (
        "exit-interval exit-duration-in-mins exit-signal-handler exit-signal "
        "adlr-autoresume adlr-autoresume-interval"
    ),
    "use --recompute-granularity selective": "recompute-activations",
    "use --recompute-granularity full with --recompute-method and --recompute-num-layers": (
        "checkpoint-activations"
    ),
    "use --tensor-model-parallel-size": "model-parallel-size",
    "use --num-layers-per-virtual-pipeline-stage": "num-virtual-stages-per-pipeline-rank",
    "use --wandb-team": "wandb-entity",
    "the run in Weights & Biases has the run's own name": "wandb-exp-name",
    "--load and --ref-load name one checkpoint; give its folder": "ckpt-step",
    "use --ref-load for weights alone": "finetune pretrained-checkpoint no-load-optim",
    "the only format is torch_dist; leave it out": (
        "ckpt-format ckpt-convert-format ckpt-convert-save dist-ckpt-format"
    ),
    "only --use-distributed-optimizer shards the optimizer": "use-torch-fsdp2",
    "only RMSNorm models with SwiGLU or GeGLU have a family": "openai-gelu squared-relu",
    "scaled rotary embeddings come from config.json": "use-rope-scaling rope-scaling-factor",
    "rlpost trains decoders only": "encoder-num-layers decoder-num-layers decoder-seq-length",
    "prompts come from --prompt-data (docs/data.md)": (
        "allow-ambiguous-pad-tokens data-cache-path "
        "dataloader-defer-npy-index-mmap dataloader-fast-cache-load eod-mask-loss "
        "mid-level-dataset-surplus "
        "num-dataset-builder-threads object-storage-cache-path per-dataset-sequences-path "
        "per-split-data-args-path phase-transition-iterations reset-attention-mask "
        "reset-position-ids sft sft-tokenizer-prompt-format "
    ),
    "metrics of every step are in metrics.jsonl; see the settings of [observe] and [wandb]": (
        "app-tag-run-name app-tag-run-version dump-param-to-param-group-map "
        "log-device-memory-used log-energy log-memory-interval log-params-norm "
        "log-validation-ppl-to-tensorboard logging-level memory-snapshot-path one-logger-async "
        "one-logger-project one-logger-run-name save-dgrads-interval save-wgrads-interval "
        "use-pytorch-profiler wandb-save-dir "
    ),
    "it is for other kinds of models or training in Megatron-LM; leave it out": (
        "bert-embedder-type bert-load bert-no-binary-head biencoder-projection-dim "
        "biencoder-shared-query-context-model block-data-path classes-fraction "
        "data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer "
        "dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer "
        "dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs "
        "embedding-path evidence-data-path fim-data "
        "fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token "
        "fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token head-lr-mult "
        "hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern ict-head-size ict-load "
        "img-h img-w indexer-batch-size indexer-log-interval iter-per-epoch mask-factor "
        "mask-prob mask-type no-data-sharding num-channels "
        "num-classes output-bert-embeddings patch-dim query-in-block-prob "
        "retriever-report-topk-accuracies retriever-score-scaling sample-rate short-seq-prob "
        "swin-backbone-type titles-data-path use-one-sent-docs vision-backbone-type "
        "vision-pretraining vision-pretraining-type "
    ),
    "answers come from SGLang; use its own options, --sglang-*": (
        "cache-mla-latents decode-only-cuda-graphs disable-chunked-prefill "
        "enable-chunked-prefill inference-batch-times-seqlen-threshold "
        "inference-coordinator-port inference-dynamic-batching "
        "inference-dynamic-batching-block-size inference-dynamic-batching-buffer-size-gb "
        "inference-dynamic-batching-cuda-graph-max-tokens "
        "inference-dynamic-batching-cuda-graph-mixed-prefill-count "
        "inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens "
        "inference-dynamic-batching-num-cuda-graphs "
        "inference-dynamic-batching-paused-buffer-size-gb "
        "inference-dynamic-batching-track-paused-request-events "
        "inference-dynamic-batching-unified-memory-level inference-logging-step-interval "
        "inference-max-batch-size inference-max-requests inference-max-seq-length "
        "inference-wandb-logging max-tokens-to-oom moe-pad-experts-for-cuda-graph-inference "
        "nccl-all-reduce-for-prefill "
        "no-inference-wandb-logging use-legacy-static-engine "
    ),
    "rlpost detects failures and restarts a run itself (docs/preemption.md); leave it out": (
        "calc-ft-timeouts check-for-spiky-loss check-weight-hash-across-dp-replicas-interval "
        "disable-straggler-on-startup enable-ft-package error-injection-rate "
        "error-injection-type ft-num-warmup-iters inprocess-active-world-size "
        "inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache "
        "inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval "
        "inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations "
        "inprocess-monitor-process-interval inprocess-monitor-thread-interval "
        "inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout "
        "inprocess-termination-grace-time log-straggler rerun-mode "
        "result-rejected-tracker-filename run-workload-inspector-server straggler-ctrlr-port "
        "straggler-minmax-count "
    ),
    "rlpost writes and reads torch_dist checkpoints itself; use --save, --load and --ref-load": (
        "disable-strict-fsdp-dtensor-load no-strict-fsdp-dtensor-load "
        "ckpt-convert-update-legacy-dist-opt-format disable-ckpt-fully-parallel-save "
        "disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-optim-fully-reshardable "
        "dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness "
        "distrib-optim-fully-reshardable-mem-efficient exit-on-missing-checkpoint "
        "load-main-params-from-ckpt no-ckpt-fully-parallel-save no-load-rng no-save-rng "
        "no-use-tokenizer-model-from-checkpoint-args non-persistent-ckpt-type "
        "non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo "
        "non-persistent-local-ckpt-dir non-persistent-save-interval persistent-save-interval "
        "replication replication-factor replication-jump save-retain-interval "
        "use-checkpoint-args use-checkpoint-opt-param-scheduler "
        "use-checkpoint-opt_param-scheduler use-mp-args-from-checkpoint-args "
    ),
    "rlpost has no counterpart and does not read it; leave it out": (
        "data-parallel-random-init exit-signal-handler-for-dataloader "
        "moe-upcycling-granularity moe-use-upcycling "
        "create-all-gather-group ddp-num-buckets "
        "disable-gloo-process-groups disable-jit-fuser disable-manual-gc-eval disable-msc "
        "distributed-timeout-seconds-after-init empty-unused-memory-level enable-experimental "
        "enable-full-sharding-in-hsdp fake-process-group fp16-lm-cross-entropy "
        "grad-reduce-in-bf16 heterogeneous-layers-config-encoded-json "
        "heterogeneous-layers-config-path high-priority-stream-groups "
        "init-method-xavier-uniform lazy-mpu-init local-rank manual-gc manual-gc-interval "
        "nccl-communicator-config-path no-align-grad-reduce no-manual-gc-eval "
        "no-scatter-gather-tensors-in-pipeline no-weight-decay-cond-type onnx-safe "
        "override-opt-param-scheduler override-opt_param-scheduler "
        "relative-attention-max-distance relative-attention-num-buckets "
        "rotary-seq-len-interpolation-factor sharp-enabled-group skip-train "
        "te-precision-config-file te-rng-tracker torch-fsdp2-no-reshard-after-forward "
        "tp-comm-overlap-cfg train-sync-interval trust-remote-code use-legacy-models use-sharp "
        "use-tp-pp-dp-mapping "
    ),
    "the tokenizer is the one of --hf-checkpoint; leave it out": (
        "tokenizer-metadata legacy-tokenizer merge-file tiktoken-num-special-tokens tiktoken-pattern "
        "tiktoken-special-tokens tokenizer-hf-include-special-tokens "
        "tokenizer-sentencepiece-legacy tokenizer-special-tokens vocab-file "
    ),
    "the command line is a recipe in TOML": "yaml-cfg",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in table.items() for name in names.split()}


ACCEPTED = _by_name(_ACCEPTED)
"""Flag without effect here -> why; a command line with it is accepted."""
REFUSED = _by_name(_REFUSED)
"""Flag that is refused -> the reason, and what to use instead."""
