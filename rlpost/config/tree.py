"""The settings of a run: one typed tree.

The names of its leaves are the flags, the TOML keys and the attributes.

Input: values already merged by ``rlpost.config.load``. Output: a frozen ``Config``. Derived values
are properties and never written back. The string under each field is its help text.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import create_model

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.algorithm.loss_settings import POLICY_LOSS_ROWS, LossSettings
from rlpost.config import extensions
from rlpost.config.engine_nodes import nodes_for
from rlpost.config.eval_sets import eval_sets
from rlpost.config.groups.assets import AssetsConfig
from rlpost.config.groups.base import Group
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.groups.critic import CriticConfig
from rlpost.config.groups.debug import DebugConfig
from rlpost.config.groups.distillation import DistillationConfig
from rlpost.config.groups.engines import EnginesConfig
from rlpost.config.groups.eval import EvalConfig
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.groups.lora import LoraConfig
from rlpost.config.groups.megatron import MegatronConfig
from rlpost.config.groups.observe import ObserveConfig
from rlpost.config.groups.optimizer import OptimizerConfig
from rlpost.config.groups.perf import PerfConfig, fp8_rows
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.groups.sglang import SglangConfig
from rlpost.config.groups.sync import SyncConfig
from rlpost.config.groups.wandb import WandbConfig

Table = TypeVar("Table", bound=Group)


class Tree(Group):
    """All settings of a run that the core has; ``Config`` has the tables of extensions too."""

    cluster: ClusterConfig = ClusterConfig()
    assets: AssetsConfig = AssetsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    perf: PerfConfig = PerfConfig()
    grpo: GrpoConfig = GrpoConfig()
    distillation: DistillationConfig = DistillationConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    sglang: SglangConfig = SglangConfig()
    engines: EnginesConfig = EnginesConfig()
    sync: SyncConfig = SyncConfig()
    megatron: MegatronConfig = MegatronConfig()
    wandb: WandbConfig = WandbConfig()
    observe: ObserveConfig = ObserveConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def tables(self) -> list[Group]:
        """Every table, those of extensions included."""
        return [getattr(self, name) for name in type(self).model_fields]

    def table(self, kind: type[Table]) -> Table:
        """Return the table of an extension: ``config.table(EnvConfig).env_max_turns``."""
        return next(table for table in self.tables if isinstance(table, kind))

    @property
    def answers_are_episodes(self) -> bool:
        """Whether an extension writes the answers, in place of one response of an engine each."""
        return any(table.writes_answers for table in self.tables)

    @property
    def num_joining_engines(self) -> int:
        """Engines of the policy in other jobs that are submitted with the run."""
        return sum(table.joining_engines for table in self.tables)

    @property
    def actor_num_nodes(self) -> int:
        return self.cluster.actor_num_nodes or self.cluster.nodes or 1

    @property
    def num_nodes(self) -> int:
        """--nodes, else the nodes that trainer and engines need."""
        cluster, a_node = self.cluster, self.cluster.num_gpus_per_node
        if cluster.nodes is not None:
            return cluster.nodes
        free = [max(0, a_node - cluster.actor_num_gpus_per_node)] * self.actor_num_nodes
        return self.actor_num_nodes + nodes_for(free, self.gpus_of_engines, a_node)

    @property
    def gpus_of_engines(self) -> list[int]:
        """GPUs of each engine with GPUs of its own, largest first, as they are placed."""
        of_policy = 0 if self.cluster.colocate else self.num_engines
        sizes = [self.cluster.rollout_num_gpus_per_engine] * of_policy
        for group in self.engines.started.values():
            sizes += [group.gpus_per_engine(self.cluster.num_gpus_per_node)] * group.num_placed
        return sorted(sizes, reverse=True)

    @property
    def gpus_by_group(self) -> dict[str, int]:
        """GPUs of the engines of each table [engines.NAME] in the run's own job."""
        a_node = self.cluster.num_gpus_per_node
        return {
            name: group.num_placed * group.gpus_per_engine(a_node)
            for name, group in self.engines.started.items()
        }

    @property
    def num_group_gpus(self) -> int:
        """GPUs of the engines of all tables [engines.NAME] in the run's own job."""
        return sum(self.gpus_by_group.values())

    @property
    def actor_world_size(self) -> int:
        """Ranks of the trainer."""
        return self.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        return self.actor_world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one sample."""
        perf = self.perf
        return (
            perf.tensor_model_parallel_size
            * perf.pipeline_model_parallel_size
            * perf.context_parallel_size
        )

    @property
    def takes_images(self) -> bool:
        """Whether prompts have images, so that the trainer runs the model's encoder of images."""
        return bool(self.rollout.multimodal_keys)

    @property
    def trains_encoder(self) -> bool:
        """Whether weights of the encoder of images are trained."""
        return self.takes_images and self.optimizer.vision_tower != "frozen"

    @property
    def num_logprob_passes(self) -> int:
        """Passes for log-probs besides training: of the policy and of a reference."""
        grpo, teacher = self.grpo, self.distillation
        is_compared = self.num_steps_per_rollout > 1 or grpo.keep_old_actor
        is_compared |= teacher.use_opd and teacher.opd_form == "advantage"
        policy = (is_compared and not grpo.use_rollout_logprobs) or bool(grpo.kl_coef)
        return policy + bool(grpo.use_kl_loss or grpo.kl_coef)

    @property
    def fuses_logprobs(self) -> bool:
        """Whether every micro-batch has a form that the kernels of log-probs know, on CUDA."""
        masked = self.grpo.use_rollout_sampling_mask or self.distillation.opd_top_k is not None
        return self.perf.fused_log_probs and not masked and not self.perf.share_prefix

    @property
    def overlaps_shared_experts(self) -> bool:
        """Whether TransformerEngine's shared experts compute during the all-to-all of the others.

        Megatron-core 0.16.1 requires the alltoall dispatcher and refuses it together with
        recomputation of shared experts alone or with all-to-alls overlapped between micro-batches.
        """
        options = self.megatron.options
        chosen = options.get("moe_shared_expert_overlap")
        if chosen is not None:
            return bool(chosen)
        recomputed = options.get("recompute_modules") or ()
        return (
            self.perf.moe_token_dispatcher_type == "alltoall"
            and not options.get("overlap_moe_expert_parallel_comm")
            and "shared_experts" not in recomputed  # type: ignore[operator]
        )

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a micro-batch over all context-parallel ranks; None without a limit."""
        if not self.perf.use_dynamic_batch_size or self.perf.max_tokens_per_gpu is None:
            return None
        return self.perf.max_tokens_per_gpu * self.perf.context_parallel_size

    @property
    def log_probs_max_tokens(self) -> int | None:
        """The same for log-prob passes; None if they use the training micro-batches."""
        if self.max_tokens is None or self.perf.log_probs_max_tokens_per_gpu is None:
            return None
        return self.perf.log_probs_max_tokens_per_gpu * self.perf.context_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of the micro-batches per rank: the size of an interleaved pipeline, else 1."""
        if self.perf.num_layers_per_virtual_pipeline_stage is None:
            return 1
        return self.perf.pipeline_model_parallel_size

    @property
    def row_multiple(self) -> int:
        """Divisor of the padded length of a row.

        Context parallelism shards a row; sequence parallelism shards each of these parts again.
        """
        perf = self.perf
        ranks = perf.tensor_model_parallel_size if perf.sequence_parallel else 1
        rows = fp8_rows(self.megatron.options) * perf.context_parallel_size
        return math.lcm(perf.sequence_multiple * ranks, rows * ranks)

    @property
    def applies_chat_template(self) -> bool:
        """Whether prompts are lists of messages.

        So they are with --loss-type sft_loss and without --label-key: the last message is the
        response.
        """
        rollout, is_sft = self.rollout, self.grpo.is_supervised
        return rollout.apply_chat_template or (is_sft and rollout.label_key is None)

    @property
    def generates(self) -> bool:
        """Whether answers are generated; else those of a recording or of the prompts are trained."""
        return not (self.debug.debug_train_only or self.grpo.is_supervised)

    @property
    def rollout_num_gpus(self) -> int:
        """GPUs of this run for engines; 0 with --loss-type sft_loss or external engines."""
        if self.grpo.is_supervised or self.sglang.rollout_external_engine_addrs:
            return 0
        return self.actor_world_size if self.cluster.colocate else self.cluster.rollout_num_gpus

    @property
    def num_engines(self) -> int:
        return self.rollout_num_gpus // self.cluster.rollout_num_gpus_per_engine

    @property
    def offload_train(self) -> bool:
        """Whether the trainer is offloaded while engines generate."""
        given = self.cluster.offload_train
        return self.cluster.colocate if given is None else given

    @property
    def offload_rollout(self) -> bool:
        """Whether engines are offloaded during training."""
        given = self.cluster.offload_rollout
        return self.cluster.colocate if given is None else given

    @property
    def sends_adapters(self) -> bool:
        """Whether engines load adapters beside the base."""
        return self.sync.update_weight_mode == "adapter"

    @property
    def records_tokens(self) -> bool:
        """Whether engines stream, so that the journal has the tokens of responses in progress.

        External engines may stream all tokens each time; no engine streams routes.
        """
        rollout = self.rollout
        is_external = bool(self.sglang.rollout_external_engine_addrs)
        can_stream = not (is_external or self.grpo.use_rollout_routing_replay)
        return rollout.partial_rollout and rollout.partial_rollout_record_s > 0 and can_stream

    @property
    def use_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        has_critic = ESTIMATORS[self.grpo.advantage_estimator].has_critic
        return has_critic and not self.grpo.is_supervised

    @property
    def loss_settings(self) -> LossSettings:
        """What losses read, with the defaults that depend on other settings."""
        grpo = self.grpo
        values = grpo.model_dump() | self.distillation.model_dump()
        values["policy_loss"] = grpo.policy_loss or ESTIMATORS[grpo.advantage_estimator].loss
        row = POLICY_LOSS_ROWS[values["policy_loss"]]
        if grpo.eps_clip_high is None:
            values["eps_clip_high"] = row.eps_clip_high if grpo.eps_clip is None else grpo.eps_clip
        if grpo.eps_clip is None:
            values["eps_clip"] = row.eps_clip
        return LossSettings(**{field.name: values[field.name] for field in fields(LossSettings)})

    @property
    def keeps_old_policy(self) -> bool:
        """Whether trainer ranks keep the weights of an update of the engines in host memory."""
        return self.grpo.keep_old_actor or self.rollout.update_weights_interval > 1

    @property
    def num_kept_weights(self) -> int:
        """Further sets of weights in a checkpoint: an updated reference, the old policy."""
        return (self.grpo.ref_update_interval is not None) + self.keeps_old_policy

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def num_steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        if self.rollout.num_steps_per_rollout is not None:
            return self.rollout.num_steps_per_rollout
        if self.rollout.global_batch_size is not None:
            return max(1, self.samples_per_rollout // self.rollout.global_batch_size)
        return 1

    @property
    def lr_decay_iters(self) -> int:
        """Optimizer steps of the learning-rate schedule."""
        return (
            self.optimizer.lr_decay_iters or self.rollout.num_rollout * self.num_steps_per_rollout
        )

    @property
    def eval_sets(self) -> tuple[tuple[str, str], ...]:
        """(name, path) of each evaluation set."""
        return tuple((each.name, each.path) for each in eval_sets(self.eval))


if TYPE_CHECKING:
    Config = Tree
else:
    _core = {name: field.annotation for name, field in Tree.model_fields.items()}
    _added: dict[str, Any] = {
        name: (kind, kind()) for name, kind in extensions.tables(_core).items()
    }
    Config = create_model("Config", __base__=Tree, __module__=__name__, **_added)
    """The settings of a run: ``Tree`` with a field for each table of an extension."""
