"""The settings of a run: one typed tree whose leaf names are the flags, the TOML keys and the attributes.

Comes in: values already merged by ``rlpost.config.load``. Goes out: a frozen ``Config``. Derived values are
properties and never written back. The string under each field is its help text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
FilePath = Annotated[str, "path"]  # made absolute when settings are loaded: a job may run in another folder
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


def _variables(given: Any) -> Any:
    """A flag gives words NAME=VALUE, a file a table."""
    if not isinstance(given, (list, tuple)):
        return given
    if wrong := [word for word in given if "=" not in str(word)]:
        raise ValueError(f"write NAME=VALUE, not {wrong[0]!r}")
    return dict(word.split("=", 1) for word in given)


Variables = Annotated[dict[str, str], BeforeValidator(_variables)]


class Group(BaseModel):
    """One TOML table."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ClusterConfig(Group):
    """Where the run lives: Slurm, nodes, GPUs and who gets them."""

    job_name: str = "rlpost"
    """Name of the job and, unless --run-folder says otherwise, of its run folder."""
    nodes: Positive = 1
    """Nodes that the run uses."""
    spare_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes allocated beyond those, to take the place of broken ones."""
    num_gpus_per_node: Positive = 8
    """GPUs of each node (without CUDA: logical slots, one process each)."""
    actor_num_nodes: Positive | None = None
    """Nodes that train; all nodes unless given."""
    actor_num_gpus_per_node: Positive = 8
    """GPUs on each of those nodes that train."""
    rollout_num_gpus: Positive = 1
    """GPUs that generate, in all."""
    rollout_num_gpus_per_engine: Positive = 1
    """GPUs of one SGLang engine (its tensor-parallel size)."""
    runs_dir: FilePath = "runs"
    """Folder on the shared file system that holds the run folders."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    reservation: str | None = None
    """Slurm reservation."""
    constraint: str | None = None
    """Features that the nodes must have, as Slurm writes them."""
    exclusive: bool = True
    """Ask for whole nodes with all their memory."""
    exclude: tuple[str, ...] = ()
    """Host lists to do without, for instance n[01-03]; those that broke during the run are added."""
    requeue: Literal["requeue", "chain", "never"] = "requeue"
    """How the run comes back: Slurm's requeue, a new job (where requeueing is forbidden), or not."""
    max_preemptions: Annotated[int, Field(ge=0)] = 100
    """How often it comes back after a preemption or its time limit."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """How often it comes back after a failure."""
    max_stalled_attempts: Positive = 3
    """Attempts in a row without a new checkpoint after which it does not come back."""
    python: str | None = None
    """Interpreter of the nodes; this one unless given, in a container its python3."""
    container: Literal["none", "pyxis", "enroot"] = "none"
    """What the agents run in."""
    container_image: str | None = None
    """Absolute path of a .sqsh file, or a name in a registry, imported once with enroot."""
    container_mounts: tuple[str, ...] = ()
    """SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro; run folder and code are mounted anyway."""
    image_cache: FilePath | None = None
    """Folder for imported images; RUNS_DIR/images unless given."""
    environment: Variables = {}
    """Variables NAME=VALUE of agents, driver and workers, also in a container. No secrets: they stand in the script."""
    setup_commands: tuple[str, ...] = ()
    """Lines of shell that each node runs before its agent, in the container."""
    time: str = "04:00:00"
    """Time limit of one attempt, as Slurm writes it."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How this site asks Slurm for GPUs."""
    signal_lead_s: Positive = 120
    """Seconds before the time limit at which Slurm warns the job."""
    socket_ifname: str | None = None
    """Network interface for Ray, GLOO and NCCL; found by itself unless given."""
    bringup_deadline_s: Positive = 600
    """Seconds until every node has joined and every engine answers, or the attempt fails and names who is missing."""
    distributed_timeout_minutes: Positive = 10
    """Minutes after which a collective of the trainer counts as hung."""
    ray_object_store_memory: Positive | None = None
    """Bytes of shared memory for Ray's object store on each node; Ray's own choice unless given."""
    ray_dashboard: bool = False
    """Run Ray's dashboard on the head's loopback; ``rlpost tunnel`` prints the way to it."""


class CheckpointConfig(Group):
    """Which weights to start from and where to keep the run's own."""

    hf_checkpoint: FilePath = ""
    """Hugging Face folder: weights to start from, tokenizer, architecture for SGLang."""
    load: FilePath | None = None
    """Folder of checkpoints to resume from; the same as --save unless given."""
    save: FilePath | None = None
    """Folder of checkpoints; RUN/checkpoints unless given."""
    save_interval: Positive | None = None
    """Steps between checkpoints; without it only at the end and at a preemption."""
    keep_last: Positive = 2
    """Committed checkpoints to keep."""


class RolloutConfig(Group):
    """Prompts, sampling and the size of a step."""

    prompt_data: FilePath = ""
    """JSONL file with one prompt a line."""
    input_key: str = "input"
    """Key of the prompt in a line."""
    label_key: str | None = None
    """Key of the expected answer in a line."""
    apply_chat_template: bool = False
    """Pass the prompt (a string or a list of messages) through the tokenizer's chat template."""
    rollout_shuffle: bool = False
    """Shuffle the prompts anew each epoch."""
    rollout_seed: int = 42
    """Seed of the shuffle."""
    rm_type: str = "exact_match"
    """Which reward function scores an answer."""
    num_rollout: Positive = 1
    """Steps to train: each generates, trains and synchronises once."""
    rollout_batch_size: Positive = 1
    """Prompts a step."""
    n_samples_per_prompt: Positive = 1
    """Answers to each prompt: the size of a group."""
    rollout_max_response_len: Positive = 1024
    """Longest answer, in tokens."""
    rollout_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; the trainer's log-probs are divided by the same."""
    rollout_top_p: Fraction = 1.0
    """Nucleus sampling."""
    rollout_top_k: int = -1
    """Top-k sampling; -1 is off."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer."""
    global_batch_size: Positive | None = None
    """Samples an optimizer step; follows from the number of steps unless given."""
    num_steps_per_rollout: Positive | None = None
    """Optimizer steps a rollout; 1 unless given or implied by --global-batch-size."""


class EvalConfig(Group):
    """Held-out prompts; what is not given is inherited from the rollout."""

    eval_interval: Positive | None = None
    """Steps between evaluations; without it there is none."""
    eval_prompt_data: tuple[str, ...] = ()
    """Pairs NAME PATH of JSONL files."""
    n_samples_per_eval_prompt: Positive = 1
    """Answers to each held-out prompt."""
    eval_temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Temperature; 0 is greedy decoding."""
    eval_top_p: Fraction | None = None
    """Nucleus sampling."""
    eval_max_response_len: Positive | None = None
    """Longest answer, in tokens."""
    skip_eval_before_train: bool = False
    """Do not evaluate before the first step."""


class PerfConfig(Group):
    """Parallel layout of the trainer and the size of its micro-batches."""

    tensor_model_parallel_size: Positive = 1
    """Tensor-parallel size."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel ranks."""
    pipeline_model_parallel_size: Positive = 1
    """Stages into which the layers are cut."""
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """Layers of a chunk: each stage then has several and works on them in turn (interleaved pipeline)."""
    decoder_first_pipeline_num_layers: Positive | None = None
    """Layers of the first stage, where the stages are not equal."""
    decoder_last_pipeline_num_layers: Positive | None = None
    """Layers of the last stage, where the stages are not equal."""
    context_parallel_size: Positive = 1
    """Ranks among which every sequence is cut."""
    expert_model_parallel_size: Positive = 1
    """Ranks among which the experts of a layer are spread."""
    expert_tensor_parallel_size: Positive | None = None
    """Ranks among which a single expert is cut; --tensor-model-parallel-size unless given."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers, or only attention, in the backward pass instead of keeping their activations."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers, with full: all in chunks of --recompute-num-layers, or that many of each stage."""
    recompute_num_layers: Positive | None = None
    """Layers of a chunk, or of a stage, that are recomputed."""
    use_distributed_optimizer: bool = True
    """Shard the state of the optimizer over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass goes on; needs the two above."""
    use_dynamic_batch_size: bool = False
    """Pack samples of different lengths up to --max-tokens-per-gpu instead of --micro-batch-size samples."""
    max_tokens_per_gpu: Positive | None = None
    """Tokens of a micro-batch on one GPU (times the context-parallel size in all); a longer sample is alone in its own
    and never cut."""
    micro_batch_size: Positive = 1
    """Samples of a micro-batch without --use-dynamic-batch-size."""
    update_weight_buffer_size: Positive = 512 * 1024**2
    """Bytes of one message of weights to the engines."""


class GrpoConfig(Group):
    """The algorithm."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """Advantages: rewards less their group's mean, over its standard deviation (grpo; gspo and cispo use them with the
    ratio of whole sequences, and with clipped weights), less the mean of the others (rloo), whitened over the batch
    (reinforce_plus_plus, with the group's mean off: _baseline)."""
    disable_grpo_std_normalization: bool = False
    """Do not divide by the standard deviation (Dr. GRPO)."""
    eps_clip: Annotated[float, Field(ge=0.0)] = 0.2
    """How far the ratio may fall below 1."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """How far the ratio may rise above 1; --eps-clip unless given."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Largest ratio that counts against a bad answer (dual clip); off unless given."""
    use_kl_loss: bool = False
    """Keep the weights of --hf-checkpoint as a reference and measure the KL divergence from it."""
    kl_loss_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of that divergence in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "low_var_kl"
    """Its estimator."""
    calculate_per_token_loss: bool = False
    """Average over all tokens of the batch instead of first over each sample."""


class OptimizerConfig(Group):
    """Adam."""

    optimizer: Literal["adam"] = "adam"
    """Which optimizer."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Learning rate."""
    lr_decay_style: Literal["constant"] = "constant"
    """Schedule of the learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight decay."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the denominator."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest norm of the gradient; 0 is off."""
    seed: int = 1234
    """Seed of the trainer's random numbers."""


class SglangConfig(Group):
    """Engines and router. Any other --sglang-X goes to SGLang's own ServerArgs under the name X."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    sglang_server_concurrency: Positive = 512
    """Requests under way at one engine."""
    router_policy: Literal["cache_aware", "round_robin", "random", "power_of_two"] = "cache_aware"
    """How the router chooses an engine."""

    @property
    def server_args(self) -> dict[str, Any]:
        """The pass-through settings, by the names of SGLang's ServerArgs."""
        return {key.removeprefix("sglang_"): value for key, value in (self.model_extra or {}).items()}

    @model_validator(mode="after")
    def _only_sglang_names(self) -> SglangConfig:
        for key in self.model_extra or {}:
            if not key.startswith("sglang_"):
                raise ValueError(f"unknown key '{key}'; options for SGLang itself begin with 'sglang_'")
        return self


class DebugConfig(Group):
    """Recording and replaying generations."""

    save_debug_rollout_data: FilePath | None = None
    """Path with {rollout_id}: write the scored groups of each step there."""
    load_debug_rollout_data: FilePath | None = None
    """Path with {rollout_id}: take the groups of each step from there instead of generating."""


class Config(Group):
    """All settings of a run."""

    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    perf: PerfConfig = PerfConfig()
    grpo: GrpoConfig = GrpoConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sglang: SglangConfig = SglangConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def actor_num_nodes(self) -> int:
        return self.cluster.actor_num_nodes or self.cluster.nodes

    @property
    def actor_world_size(self) -> int:
        """Ranks of the trainer."""
        return self.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        return self.actor_world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on one sample together."""
        perf = self.perf
        return perf.tensor_model_parallel_size * perf.pipeline_model_parallel_size * perf.context_parallel_size

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a micro-batch, whose sequences all context-parallel ranks share; None without a limit."""
        if not self.perf.use_dynamic_batch_size or self.perf.max_tokens_per_gpu is None:
            return None
        return self.perf.max_tokens_per_gpu * self.perf.context_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """What the micro-batches of a rank must be a multiple of: an interleaved pipeline is filled in whole rounds."""
        return 1 if self.perf.num_layers_per_virtual_pipeline_stage is None else self.perf.pipeline_model_parallel_size

    @property
    def num_engines(self) -> int:
        return self.cluster.rollout_num_gpus // self.cluster.rollout_num_gpus_per_engine

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def num_steps_per_rollout(self) -> int:
        """Optimizer steps a rollout."""
        if self.rollout.num_steps_per_rollout is not None:
            return self.rollout.num_steps_per_rollout
        if self.rollout.global_batch_size is not None:
            return max(1, self.samples_per_rollout // self.rollout.global_batch_size)
        return 1

    @property
    def eval_sets(self) -> tuple[tuple[str, str], ...]:
        """(name, path) of each evaluation set."""
        pairs = self.eval.eval_prompt_data
        return tuple(zip(pairs[0::2], pairs[1::2], strict=False))
