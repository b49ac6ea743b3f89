"""The settings of the actor: the leaves of the configuration it needs, nothing of the tree. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Names and units are those of the configuration's leaves."""

    hf_checkpoint: str
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
    lr: float = 1e-6
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    seed: int = 1234
    temperature: float = 1.0
    advantage_estimator: str = "grpo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "low_var_kl"
    calculate_per_token_loss: bool = False
    distributed_timeout_minutes: int = 10
    update_weight_buffer_size: int = 512 * 1024**2
    num_threads: int = 1

    @property
    def sequence_multiple(self) -> int:
        """What the length of every packed sequence is padded to: two chunks a context-parallel rank."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """What the length of a packed row is padded to: sequence parallelism cuts each rank's part once more."""
        return self.sequence_multiple * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: an interleaved pipeline is filled in whole rounds."""
        return 1 if self.num_layers_per_virtual_pipeline_stage is None else self.pipeline_model_parallel_size
