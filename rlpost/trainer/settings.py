"""The settings of the actor: the leaves of the configuration that it needs.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlpost.algorithm.advantage import ESTIMATOR_OF
from rlpost.algorithm.loss_settings import LossSettings
from rlpost.config.flags import fields
from rlpost.config.groups.perf import row_multiple, sequence_multiple
from rlpost.config.tree import Config


@dataclass(frozen=True, slots=True)
class ActorSettings(LossSettings):
    """Fields have the names and units of the configuration's leaves."""

    hf_checkpoint: str
    ref_load: str | None = None
    opd_teacher_load: str | None = None
    opd_teacher_hf_checkpoint: str | None = None
    no_save_optim: bool = False
    save_buffer_gb: float = 4.0
    save_deadline_s: float = 1800.0
    model_args: Mapping[str, object] = field(default_factory=dict)
    """Values of [model] by name; all others come from config.json."""
    megatron: Mapping[str, object] = field(default_factory=dict)
    """Fields of Megatron's dataclasses by name; they override those that the trainer sets."""
    bf16: bool | None = False
    """None: true on a GPU, else false."""
    accumulate_allreduce_grads_in_fp32: bool = True
    transformer_impl: str | None = None
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    enable_mtp_training: bool = False
    mtp_loss_scaling_factor: float = 0.1
    lora_rank: int | None = None
    """None: all weights are trained."""
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    lora_export: str = "merged"
    update_weight_mode: str = "full"
    only_train_params_name_list: tuple[str, ...] = ()
    freeze_params_name_list: tuple[str, ...] = ()
    optimizer: str = "adam"
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_num_ns_steps: int = 5
    muon_scale: str = "match_rms_adam"
    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay_style: str = "constant"
    lr_decay_iters: int = 1
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_iters: int | None = None
    weight_decay: float = 0.01
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    use_rollout_routing_replay: bool = False
    use_routing_replay: bool = False
    keeps_old_policy: bool = False
    """Whether a rank keeps an older version of the policy in host memory."""
    seed: int = 1234
    temperature: float = 1.0
    distributed_timeout_minutes: int = 10
    rollout_external_engine_addrs: tuple[str, ...] = ()
    update_weight_buffer_size: int = 4 * 1024**3
    num_engines: int = 1
    share_prefix: bool | None = None
    actor_num_threads: int | None = None
    """None: with an optimizer on the CPU the rank's share of the node's cores, else 1."""
    bind_cpus: bool = True
    offload_nccl: bool = False
    num_gpus_per_node: int = 1
    actor_num_gpus_per_node: int = 1
    use_critic: bool = False
    critic_load: str | None = None
    critic_lr: float | None = None
    critic_lr_warmup_iters: int = 0
    value_clip: float | None = 0.2

    @property
    def of_critic(self) -> ActorSettings:
        """The settings of the critic.

        It has a separate learning rate and separate initial weights, but neither routing replay nor
        a layer for multi-token prediction.
        """
        return replace(
            self,
            ref_load=self.critic_load or self.ref_load,
            lr=self.lr if self.critic_lr is None else self.critic_lr,
            lr_warmup_iters=self.critic_lr_warmup_iters,
            lr_warmup_fraction=None,
            lr_warmup_init=0.0,
            enable_mtp_training=False,
            use_rollout_routing_replay=False,
            use_routing_replay=False,
        )

    @property
    def save_buffer_bytes(self) -> int:
        """Host memory of a save in addition to the tensors, in bytes."""
        return int(self.save_buffer_gb * 10**9)

    @property
    def sequence_multiple(self) -> int:
        """Divisor of the padded length of every packed sequence."""
        return sequence_multiple(self.context_parallel_size)

    @property
    def row_multiple(self) -> int:
        """Divisor of the padded length of a row."""
        return row_multiple(
            context_parallel_size=self.context_parallel_size,
            sequence_ranks=self.tensor_model_parallel_size if self.sequence_parallel else 1,
            options=self.megatron,
        )


def actor_settings(config: Config) -> ActorSettings:
    """Return an actor's settings: settings of the same name in any table, and derived ones."""
    wanted = {field.name for field in dataclasses.fields(ActorSettings)}
    leaves = {
        key: getattr(getattr(config, group), key)
        for key, group in fields().items()
        if key in wanted
    }
    grpo, given = config.grpo, config.model.model_dump()
    estimator = grpo.advantage_estimator
    derived = {
        "temperature": config.rollout.rollout_temperature,
        "num_engines": config.num_engines,
        "policy_loss": grpo.policy_loss or (estimator if estimator in ESTIMATOR_OF else "ppo"),
        "eps_clip_high": grpo.eps_clip if grpo.eps_clip_high is None else grpo.eps_clip_high,
        "keeps_old_policy": config.keeps_old_policy,
        "lr_decay_iters": config.lr_decay_iters,
        "model_args": {key: value for key, value in given.items() if value is not None},
        "megatron": config.megatron.options,
        "use_critic": config.use_critic and not config.has_own_critic,
    }
    return ActorSettings(**(leaves | derived))
