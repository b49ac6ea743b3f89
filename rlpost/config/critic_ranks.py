"""Settings of a critic, in the form of a trainer's. Pure.

Input: the settings of a run. Output: the same tree with the critic's weights and learning rate in
place of the policy's or, for a critic with separate ranks, with its nodes, GPUs, layout and
micro-batches, so that everything that reads a layout serves both.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlpost.config.flags import flag
from rlpost.config.groups.critic import LAYOUT as OWN_LAYOUT
from rlpost.config.tree import Config
from rlpost.config.wording import with_values

LAYOUT = {
    "critic_num_nodes": "actor_num_nodes",
    "critic_num_gpus_per_node": "actor_num_gpus_per_node",
    **OWN_LAYOUT,
}
"""The critic's settings, and the policy's whose value is the default."""


def critic_ranks(config: Config) -> Config:
    """Return the settings of the critic's ranks."""
    critic, perf, cluster = config.critic, config.perf, config.cluster
    tensor = critic.critic_tensor_model_parallel_size or perf.tensor_model_parallel_size
    layout = {
        policy: getattr(critic, own) or getattr(perf, policy)
        for own, policy in LAYOUT.items()
        if policy in type(perf).model_fields
    }
    layout["sequence_parallel"] = perf.sequence_parallel and tensor > 1
    if layout["context_parallel_size"] > 1:
        layout["share_prefix"] = False  # see ``checks.prefix``
    if critic.critic_tensor_model_parallel_size is not None:
        layout["expert_tensor_parallel_size"] = None
    if critic.critic_pipeline_model_parallel_size is not None:
        layout["num_layers_per_virtual_pipeline_stage"] = None
        layout["decoder_first_pipeline_num_layers"] = None
        layout["decoder_last_pipeline_num_layers"] = None
    if critic.critic_max_tokens_per_gpu is not None:
        layout["log_probs_max_tokens_per_gpu"] = None
    places = {
        "actor_num_nodes": critic.critic_num_nodes or config.actor_num_nodes,
        "actor_num_gpus_per_node": critic.critic_num_gpus_per_node
        or cluster.actor_num_gpus_per_node,
        "rollout_num_gpus": 0,
        "rollout_num_gpus_per_engine": 1,
        "colocate": False,
        "offload_train": False,
        "offload_rollout": False,
    }
    own = {"critic_own_gpus": False, **dict.fromkeys(LAYOUT)}
    return with_values(config, **layout, **places, **own)


def of_critic(config: Config) -> Config:
    """Return the settings of the critic's model on ranks with these settings.

    It has a separate learning rate and separate initial weights, but neither routing replay nor a
    layer for multi-token prediction.
    """
    critic = config.critic
    return with_values(
        config,
        ref_load=critic.critic_load or config.checkpoint.ref_load,
        lr=config.optimizer.lr if critic.critic_lr is None else critic.critic_lr,
        lr_warmup_iters=critic.critic_lr_warmup_iters,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
        enable_mtp_training=False,
        use_rollout_routing_replay=False,
        use_routing_replay=False,
    )


def in_flags_of_critic(line: str) -> str:
    """Return a message about ``critic_ranks`` with the critic's flags."""
    for own, policy in LAYOUT.items():
        line = line.replace(f"{flag(policy)} ", f"{flag(own)} ")
    return line.replace("the trainer", "the critic")


def critic_nodes(free: Sequence[int], config: Config) -> list[int] | None:
    """Choose the critic's nodes by their free GPUs: the first that have enough.

    None if too few have.
    """
    own = critic_ranks(config)
    able = [index for index, gpus in enumerate(free) if gpus >= own.cluster.actor_num_gpus_per_node]
    return able[: own.actor_num_nodes] if len(able) >= own.actor_num_nodes else None
