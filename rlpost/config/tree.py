"""The settings of a run: one typed tree whose leaf names are the flags, the TOML keys and the attributes.

Comes in: values already merged by ``rlpost.config.load``. Goes out: a frozen ``Config``. Derived values are
properties and never written back. The string under each field is its help text.
"""

from __future__ import annotations

from rlpost.config.groups.base import Group
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.groups.debug import DebugConfig
from rlpost.config.groups.eval import EvalConfig
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.groups.optimizer import OptimizerConfig
from rlpost.config.groups.perf import PerfConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.groups.sglang import SglangConfig


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
