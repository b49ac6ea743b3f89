"""Settings of the critic: what does not go together, and what the planner counts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlpost.config import flags
from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.checks.batch import batch_problems
from rlpost.config.load import dump, load, parse_dump, read_dump
from rlpost.config.plan.shape import (
    Layout,
    Shape,
    rank_parameters,
)
from rlpost.errors import ConfigError
from rlpost.extensions.planning.counts import critic_parameters
from rlpost.extensions.planning.estimate import estimate

DENSE = Shape(hidden=8, ffn=16, heads=4, groups=2, head_dim=2, vocab=30, sparse=(False,) * 4)
PPO = {"advantage_estimator": "ppo"}


def config(**groups):
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "colocate": True}
    return load([], {"cluster": cluster, **groups}).config


def test_discounts_and_one_answer_a_prompt_are_accepted():
    given = config(
        grpo=PPO | {"gamma": 0.9, "lambd": 0.9},
        critic={"value_clip": None},
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
    assert settings.use_critic and settings.optimizer.lr == 1e-6
    from rlpost.trainer.critic import of_critic  # loads Megatron

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


def test_a_layout_or_gpus_of_the_critic_are_refused_in_flags_recipes_and_old_records(tmp_path):
    gone = [
        "critic_num_nodes",
        "critic_num_gpus_per_node",
        "critic_own_gpus",
        "critic_micro_batch_size",
    ]
    gone += [f"critic_{kind}_parallel_size" for kind in ("tensor_model", "context", "expert_model")]
    reason = "the ranks of the policy train the critic too"
    for key in gone:
        words = [flags.flag(key), "2"]
        with pytest.raises(ConfigError, match=reason):
            flags.parse(flags.make_parser("rlpost", ""), words)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[critic]\n" + "".join(f"{key} = 2\n" for key in gone))
    with pytest.raises(ConfigError) as refused:
        load([recipe], {})
    assert [reason in line for line in str(refused.value).splitlines()] == [True] * len(gone)
    older = json.loads(dump(config(grpo=PPO)))
    older["critic"] |= dict.fromkeys(gone, None) | {"critic_own_gpus": False}
    assert parse_dump(json.dumps(older)) == config(grpo=PPO)
    older["critic"]["critic_own_gpus"] = True
    assert read_dump(json.dumps(older)) == (
        config(grpo=PPO),
        [f"run.json of an earlier version: --critic-own-gpus true: {reason}, with its layout and "
         "micro-batches; leave it out"],
    )  # fmt: skip
