"""Settings of the critic: what does not go together, and what the planner counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlpost.config.checks.algorithm import (
    algorithm_problems,
    own_critic_model_problems,
    own_critic_problems,
)
from rlpost.config.checks.batch import batch_problems
from rlpost.config.critic_ranks import critic_ranks, of_critic
from rlpost.config.load import load
from rlpost.config.plan.estimate import estimate
from rlpost.config.plan.nccl_memory import trainer_context
from rlpost.config.plan.shape import (
    Layout,
    Shape,
    critic_parameters,
    layout_of,
    rank_parameters,
)
from rlpost.driver.ledger_lines import gpus_by_role
from rlpost.driver.observation import pace
from rlpost.observe.report.gpu_layout import GpuLayout

DENSE = Shape(hidden=8, ffn=16, heads=4, groups=2, head_dim=2, vocab=30, sparse=(False,) * 4)
PPO = {"advantage_estimator": "ppo"}


def config(**groups):
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "colocate": True}
    return load([], {"cluster": cluster, **groups}).config


def test_the_critic_s_own_numbers_and_one_answer_a_prompt_are_accepted():
    sizes = {"critic_num_nodes": 1, "critic_num_gpus_per_node": 8, "value_clip": None}
    given = config(
        grpo=PPO | {"gamma": 0.9, "lambd": 0.9},
        critic=sizes,
        rollout={"rollout_batch_size": 8, "n_samples_per_prompt": 1},
    )
    assert algorithm_problems(given) == batch_problems(given) == []
    assert (
        algorithm_problems(
            config(grpo={"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9})
        )
        == []
    )


def test_the_critic_has_its_own_rate_and_weights(tmp_path):
    given = {
        "grpo": PPO,
        "checkpoint": {"hf_checkpoint": str(tmp_path)},
        "optimizer": {"lr": 1e-6, "lr_warmup_fraction": 0.1},
        "critic": {
            "critic_lr": 1e-5,
            "critic_lr_warmup_iters": 3,
            "critic_load": str(tmp_path / "value"),
        },
    }
    settings = config(**given)
    assert settings.critic_shares_ranks and settings.optimizer.lr == 1e-6
    own = of_critic(settings)
    table = own.optimizer
    assert (table.lr, table.lr_warmup_iters, table.lr_warmup_fraction) == (1e-5, 3, None)
    assert own.checkpoint.ref_load == str(tmp_path / "value")
    given["critic"] = {}
    own = of_critic(config(**given))
    assert own.optimizer.lr == 1e-6 and own.checkpoint.ref_load is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_the_policy_s_parameters_with_a_head_for_the_output_layer(tied):
    shape = replace(DENSE, tied=tied)
    policy = replace(DENSE, tied=True).parameters.dense
    assert critic_parameters(shape, Layout(), 0).dense == policy + 8 + 1
    layout = Layout(world=4, tensor=2, pipeline=2)
    first, last = (critic_parameters(shape, layout, stage).dense for stage in (0, 1))
    assert first == rank_parameters(shape, layout, 0).dense
    assert last == rank_parameters(shape, layout, 1).dense - 15 * 8 + 8 + 1


def test_the_planner_counts_the_critic():
    """Weights, gradients and state beside the policy's; in the checkpoint too."""
    shape = replace(DENSE, vocab=32000, hidden=256, ffn=512)
    perf = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1024}
    alone, both = (
        estimate(config(grpo=grpo, perf=perf), shape, gpu_bytes=10**10) for grpo in ({}, PPO)
    )
    critic = both.fullest.critic
    assert alone.fullest.critic.total == 0
    assert critic.weights == 2 * critic_parameters(shape, Layout(), 0).dense
    assert critic.gradients == 2 * critic.weights
    assert both.fullest.train == alone.fullest.train + critic.total
    assert dict(both.phases[0].parts)["critic"] == critic.total
    assert "critic" not in dict(both.phases[1].parts), "offloaded before weights are sent"
    added = both.checkpoint_bytes - alone.checkpoint_bytes
    assert added == 14 * critic_parameters(shape, Layout(), 0).dense
    assert both.checkpoint_bytes_per_rank > alone.checkpoint_bytes_per_rank
    assert both.host_bytes_per_node > alone.host_bytes_per_node


OWN = {"nodes": 2, "num_gpus_per_node": 8, "actor_num_nodes": 1, "actor_num_gpus_per_node": 8}


def own_critic(critic, cluster=OWN, **groups):
    given = {"cluster": {**cluster, "colocate": True}, "grpo": PPO, **groups}
    return load([], {**given, "critic": {"critic_own_gpus": True, **critic}}).config


def test_a_rank_of_a_critic_on_its_own_gpus_that_writes_most_of_a_checkpoint_is_counted():
    """Two ranks write the critic, eight the policy, whose output layer the critic lacks."""
    shape = replace(DENSE, vocab=32000, hidden=256, ffn=512)
    perf = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1024}
    run = own_critic({"critic_num_gpus_per_node": 2}, perf=perf)
    made = estimate(run, shape, gpu_bytes=10**10)
    of_critic = 14 * critic_parameters(shape, Layout(), 0).dense // 2
    assert made.checkpoint_bytes_per_rank == pytest.approx(of_critic, abs=14)
    assert made.checkpoint_bytes_per_rank > 2 * made.fullest.saved
    assert made.save_buffer_bytes == made.checkpoint_bytes_per_rank, "less than --save-buffer-gb"


def test_a_critic_with_a_layout_of_its_own_fits_and_is_planned_on_its_own_gpus():
    sizes = {"critic_num_gpus_per_node": 4, "critic_tensor_model_parallel_size": 2}
    made = own_critic(sizes, rollout={"rollout_batch_size": 8})
    assert own_critic_problems(made) == [] == algorithm_problems(made)
    assert own_critic_model_problems(made, {"num_attention_heads": 4, "num_hidden_layers": 2}) == []
    (problem,) = own_critic_model_problems(made, {"num_attention_heads": 3, "num_hidden_layers": 2})
    assert problem.startswith("critic: --critic-tensor-model-parallel-size 2 ")
    ranks = critic_ranks(made)
    assert (ranks.actor_world_size, ranks.data_parallel_size) == (4, 2)
    assert (made.critic_shares_ranks, ranks.critic_shares_ranks) == (False, True)
    assert (
        made.perf.tensor_model_parallel_size,
        ranks.perf.tensor_model_parallel_size,
    ) == (1, 2)
    found = estimate(made, DENSE, gpu_bytes=80 * 10**9)
    beside = estimate(config(grpo=PPO), DENSE, gpu_bytes=80 * 10**9)
    alone = estimate(config(), DENSE, gpu_bytes=80 * 10**9)
    assert found.fullest.train == alone.fullest.train < beside.fullest.train
    (phase,) = [phase for phase in found.phases if phase.name == "critic"]
    parameters = critic_parameters(DENSE, Layout(world=4, tensor=2), 0).total
    assert dict(phase.parts)["weights"] == 2 * parameters
    assert found.checkpoint_bytes == beside.checkpoint_bytes


def test_nodes_of_the_run_grow_by_those_of_the_critic():
    without = {key: value for key, value in OWN.items() if key != "nodes"}
    assert own_critic({"critic_num_nodes": 2}, cluster=without).num_nodes == 3


def test_a_layout_gives_the_critic_ranks_of_its_own_on_the_policy_s_gpus():
    sizes = {"critic_own_gpus": False, "critic_tensor_model_parallel_size": 2}
    made = own_critic(sizes, rollout={"rollout_batch_size": 8})
    assert own_critic_problems(made) == [] == algorithm_problems(made)
    assert made.has_own_critic and made.critic_shares_gpus and made.offloads_critic
    assert made.critic_num_nodes == 0
    ranks = critic_ranks(made)
    assert (ranks.actor_world_size, ranks.data_parallel_size) == (8, 4)
    assert not ranks.has_own_critic, "its ranks have the critic as what they train"
    assert (made.critic_shares_ranks, ranks.critic_shares_ranks) == (False, True)
    assert not config(grpo=PPO).has_own_critic


def test_gpus_that_policy_and_critic_share_hold_one_of_the_two_at_a_time():
    """Where the trainer is offloaded; otherwise both."""
    sizes = {"critic_own_gpus": False, "critic_tensor_model_parallel_size": 2}
    gpu = {"gpu_bytes": 80 * 10**9}
    parameters = critic_parameters(DENSE, Layout(world=8, tensor=2), 0).total
    offloaded = estimate(own_critic(sizes), DENSE, **gpu)
    alone = estimate(config(), DENSE, **gpu)
    phases, without = (
        {phase.name: dict(phase.parts) for phase in one.phases} for one in (offloaded, alone)
    )
    assert phases["critic"]["weights"] == 2 * parameters
    contexts = {name: parts.pop("CUDA, NCCL") for name, parts in phases.items()}
    ranks = critic_ranks(offloaded.config)
    own = trainer_context(ranks, layout_of(ranks), DENSE)
    assert set(contexts.values()) == {alone.fullest.context + own}, "each process has a context"
    of_policy = {name: {**parts} for name, parts in without.items()}
    for parts in of_policy.values():
        parts.pop("CUDA, NCCL")
    assert phases["generate"].pop("KV cache") < of_policy["generate"].pop("KV cache")
    assert {name: phases[name] for name in of_policy} == of_policy
    assert offloaded.host_bytes_per_node > alone.host_bytes_per_node
    resident = own_critic(sizes, cluster={**OWN, "offload_train": False})
    both = estimate(resident, DENSE, **gpu)
    shared = {phase.name: dict(phase.parts) for phase in both.phases}
    assert "critic" not in shared
    assert shared["train"]["critic"] > shared["generate"]["critic"] == both.critic.total > 0


def test_each_node_writes_its_part_of_a_checkpoint():
    """A policy on one node and a critic on two: half of the critic's part for each."""
    sizes = {"critic_num_nodes": 2, "critic_num_gpus_per_node": 8}
    cluster = {**OWN, "nodes": 3}
    made = estimate(own_critic(sizes, cluster=cluster), DENSE, gpu_bytes=80 * 10**9)
    of_critic = 14 * critic_parameters(DENSE, Layout(), 0).total
    assert made.critic_checkpoint_bytes == of_critic
    of_policy = made.checkpoint_bytes - of_critic
    assert made.written_s(1.0) == pytest.approx((of_policy + of_critic / 2) / 1e9)
    beside = estimate(config(grpo=PPO), DENSE, gpu_bytes=80 * 10**9)
    assert beside.critic_checkpoint_bytes == 0
    assert beside.written_s(2.0) == pytest.approx(beside.checkpoint_bytes / 2e9)


def test_gpus_of_a_critic_on_its_own_train_and_those_that_it_shares_are_counted_once():
    """In figures a GPU, in the goodput and in the comparison with earlier runs."""
    own = own_critic({"critic_num_gpus_per_node": 4})
    shared = own_critic({"critic_own_gpus": False, "critic_tensor_model_parallel_size": 2})
    assert [made.num_training_gpus for made in (own, shared, config(grpo=PPO))] == [12, 8, 8]
    assert GpuLayout.of(own).trainer == gpus_by_role(own)["trainer"] == 12
    metrics = {"time/step_s": 2.0, "rollout/num_tokens": 4800.0}
    assert pace(metrics, own)["time/tokens_per_s_per_gpu"] == 200.0
    assert pace(metrics, shared)["time/tokens_per_s_per_gpu"] == 300.0
