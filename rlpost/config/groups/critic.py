"""The table [critic] of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpost.config.groups.base import FilePath, Group, Positive, PositiveNumber

Count = Annotated[int, Field(ge=0)]
LAYOUT = {
    "critic_tensor_model_parallel_size": "tensor_model_parallel_size",
    "critic_pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "critic_context_parallel_size": "context_parallel_size",
    "critic_expert_model_parallel_size": "expert_model_parallel_size",
    "critic_max_tokens_per_gpu": "max_tokens_per_gpu",
    "critic_micro_batch_size": "micro_batch_size",
}
"""The critic's layout and micro-batches, and the policy's setting that is the default."""


class CriticConfig(Group):
    """The value model of --advantage-estimator ppo (docs/ppo.md)."""

    value_clip: PositiveNumber | None = 0.2
    """The critic's loss does not reward a value that has moved further than this from that before
    the update; none: no clipping."""
    num_critic_only_steps: Count = 0
    """Rollouts at the start of a run that train the critic alone."""
    critic_load: FilePath | None = None
    """Initial weights of the critic: a Hugging Face folder or a torch_dist folder of the policy's
    architecture, with a value head (an exported critic) or without. Default: --ref-load, else
    --hf-checkpoint. A new head is random."""
    critic_lr: PositiveNumber | None = None
    """Peak learning rate of the critic. Default: --lr. Schedule, weight decay and betas are those
    of [optimizer]."""
    critic_lr_warmup_iters: Count = 0
    """Optimizer steps of the critic's warm-up from 0."""
    critic_own_gpus: bool = False
    """Train the critic on separate GPUs, as a second group of ranks. Default: on the GPUs of the
    policy."""
    critic_num_nodes: Positive | None = None
    """Nodes of the critic. Default: --actor-num-nodes, the only number that is accepted without
    --critic-own-gpus."""
    critic_num_gpus_per_node: Positive | None = None
    """GPUs of the critic on each of its nodes. Default: --actor-num-gpus-per-node, likewise."""
    critic_tensor_model_parallel_size: Positive | None = None
    """Tensor-parallel size of the critic. Default: that of the policy, as for all sizes below. With
    any of them the critic has its own processes, on the policy's GPUs or with --critic-own-gpus on
    its own."""
    critic_pipeline_model_parallel_size: Positive | None = None
    """Pipeline-parallel size of the critic, in even stages that are not interleaved."""
    critic_context_parallel_size: Positive | None = None
    """Context-parallel size of the critic."""
    critic_expert_model_parallel_size: Positive | None = None
    """Expert-parallel size of the critic."""
    critic_max_tokens_per_gpu: Positive | None = None
    """Tokens of a micro-batch of the critic on one GPU, with --use-dynamic-batch-size."""
    critic_micro_batch_size: Positive | None = None
    """Samples of a micro-batch of the critic, without --use-dynamic-batch-size."""

    @property
    def own_layout(self) -> tuple[str, ...]:
        """The settings of layout and micro-batches that are given: the critic's own."""
        return tuple(key for key in LAYOUT if getattr(self, key) is not None)
