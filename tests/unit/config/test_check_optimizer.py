"""Schedules and precisions that cannot be are named with their numbers."""

import pytest

from rlpost.config.checks.observe import observe_problems
from rlpost.config.checks.optimizer import optimizer_problems
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError


def config(perf=None, **optimizer):
    return load(
        [], {"optimizer": optimizer, "perf": perf or {}, "rollout": {"num_rollout": 10}}
    ).config


def test_the_settings_of_published_recipes_have_no_problems():
    offloaded = {
        "lr": 1e-6,
        "lr_decay_style": "constant",
        "weight_decay": 0.1,
        "adam_beta2": 0.98,
        "optimizer_cpu_offload": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "use_precision_aware_optimizer": True,
    }
    assert optimizer_problems(config()) == optimizer_problems(config(**offloaded)) == []
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "lr_warmup_iters": 2}
    assert optimizer_problems(config(**wsd)) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_lr": 1.0}, ["--min-lr 1 is above --lr 1e-06"]),
        ({"lr_warmup_init": 1.0}, ["--lr-warmup-init 1 is above --lr 1e-06"]),
        (
            {"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1},
            ["--lr-warmup-iters 2 and --lr-warmup-fraction 0.1"],
        ),
        (
            {"lr_decay_style": "cosine", "lr_warmup_iters": 10},
            ["warm-up of 10", "the 10 optimizer steps", "such as --lr-warmup-iters 1"],
        ),
        ({"lr_decay_style": "WSD"}, ["needs --lr-wsd-decay-iters"]),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11},
            ["--lr-wsd-decay-iters 11", "the 10 optimizer steps"],
        ),
        (
            {"end_weight_decay": 0.1},
            ["--end-weight-decay 0.1 needs --weight-decay-incr-style linear or cosine"],
        ),
        (
            {"weight_decay_incr_style": "linear", "end_weight_decay": 0.001},
            ["--start-weight-decay 0.01 to --end-weight-decay 0.001"],
        ),
        ({"overlap_cpu_optimizer_d2h_h2d": True}, ["needs --optimizer-cpu-offload"]),
        (
            {"exp_avg_dtype": "bf16"},
            ["--exp-avg-dtype bf16", "--use-precision-aware-optimizer true"],
        ),
        (
            {"use_precision_aware_optimizer": True, "perf": {"use_distributed_optimizer": False}},
            ["use --use-distributed-optimizer true"],
        ),
        (
            {"optimizer_cpu_offload": True, "perf": {"use_distributed_optimizer": False}},
            ["--optimizer-cpu-offload true needs --use-distributed-optimizer"],
        ),
        (
            {
                "optimizer_cpu_offload": True,
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": "bf16",
            },
            [
                "--exp-avg-dtype bf16 with --optimizer-cpu-offload true",
                "use --exp-avg-dtype fp32 or",
            ],
        ),
    ],
)
def test_what_cannot_be_is_named_with_its_numbers(given, words):
    (problem,) = optimizer_problems(config(**given))
    assert all(word in problem for word in words), problem


def test_a_learning_rate_falls_over_all_steps_of_the_run_unless_told_otherwise():
    assert config().lr_decay_iters == 10
    assert config(lr_decay_iters=7).lr_decay_iters == 7


def problems(**observe):
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2}
    return observe_problems(
        Config.model_validate(
            {"rollout": {"num_rollout": 20}, "cluster": cluster, "observe": observe}
        )
    )


@pytest.mark.parametrize(("text", "steps"), [("3:5", [3, 4, 5]), ("7", [7]), ("2:2", [2])])
def test_steps_are_traced_from_the_first_to_the_last(text, steps):
    config = load([], {"observe": {"trace_steps": text}}).config
    assert list(config.observe.traced) == steps
    assert list(config.observe.profiled) == []


@pytest.mark.parametrize("text", ["5:3", "0:3", "a", "3-5", "3:"])
def test_what_is_no_range_of_steps_is_an_error_with_its_form(text):
    with pytest.raises(ConfigError, match="FIRST:LAST"):
        load([], {"observe": {"trace_steps": text}})


def test_a_profile_that_would_be_empty_is_named_and_one_that_is_not_wanted_is_none():
    assert problems(profile_step_start=9, profile_step_end=3) == []
    assert problems(profile=True) == []
    (order,) = problems(profile=True, profile_step_start=9, profile_step_end=9)
    assert "--profile-step-end 9 must be above --profile-step-start 9" in order
    (late,) = problems(record_memory_history=True, profile_step_start=21, profile_step_end=22)
    assert "--profile-step-start 21 is after the last step, --num-rollout 20" in late
    (rank,) = problems(profile=True, profile_ranks=(0, 2))
    assert "rank 2 does not exist" in rank
    (trace,) = problems(trace_steps="21:22")
    assert "--trace-steps 21:22" in trace
