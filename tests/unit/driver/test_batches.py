"""Groups become batches: each sample once, with its group's advantage and global denominators."""

from dataclasses import replace

import numpy as np
import pytest

from rlpost.algorithm.advantage import grpo_advantages
from rlpost.columns import RouteColumn, TokenSetColumn
from rlpost.config.load import load
from rlpost.driver.batches import (
    deal,
    prefix_metrics,
    rollout_metrics,
    rollout_samples,
)
from rlpost.driver.model_flops import model_break_even
from rlpost.errors import DataError
from rlpost.trainer.packing import RowLayout, pack
from rlpost.types import Sample, SampleGroup, ScoredSample
from tests.unit.rollout_batches import make_batches


def group(prompt_id, rewards, length=3, finish="stop"):
    samples = tuple(
        ScoredSample(
            Sample(
                prompt_id,
                i,
                (1, 2),
                tuple(range(10, 10 + length + i)),
                (-0.5,) * (length + i),
                "",
                finish,
                0,
            ),
            reward,
        )
        for i, reward in enumerate(rewards)
    )
    return SampleGroup(prompt_id, samples)


def config(**groups):
    base = {
        "cluster": {"actor_num_gpus_per_node": 2, "num_gpus_per_node": 4},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2},
    }
    return load([], base | groups).config


def test_every_sample_is_trained_once_with_the_denominators_of_its_step():
    groups = [group(i, [1.0, 0.0]) for i in range(4)]
    steps = make_batches(
        groups,
        config(
            rollout={"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_steps_per_rollout": 2}
        ),
    )
    assert len(steps) == 2
    for ranks in steps:
        assert len(ranks) == 2
        samples = [
            sample
            for batch in ranks
            for micro_batch in batch.micro_batches
            for sample in micro_batch
        ]
        assert len(samples) == 4 == ranks[0].num_samples
        assert {batch.num_tokens for batch in ranks} == {
            sum(sample.response_length for sample in samples)
        }
        assert sorted(sample.advantage for sample in samples) == pytest.approx(
            [-0.70710578, -0.70710578, 0.70710578, 0.70710578]
        )


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_any_number_of_samples_is_trained_once_in_the_configured_number_of_steps(num_steps):
    """A user's generate function may return any number of samples per prompt."""
    rollout = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "num_steps_per_rollout": num_steps,
    }
    groups = [
        group(0, [1.0, 0.0, 0.5]),
        group(1, [1.0, 0.0]),
        group(2, [0.0] * 5 + [1.0]),
        group(3, [1.0, 0.0]),
    ]
    steps = make_batches(groups, config(rollout=rollout))
    assert len(steps) == num_steps and sum(ranks[0].num_samples for ranks in steps) == 13
    trained = []
    for ranks in steps:
        first, second = (batch.micro_batches for batch in ranks)
        assert len(first) == len(second) and all((*first, *second))
        counting = [sample for one in (*first, *second) for sample in one if any(sample.loss_mask)]
        assert len(counting) == ranks[0].num_samples
        assert {batch.num_tokens for batch in ranks} == {
            sum(sum(sample.loss_mask) for sample in counting)
        }
        trained += counting
    lengths = sorted(len(scored.sample.response_ids) for one in groups for scored in one.samples)
    assert sorted(sample.response_length for sample in trained) == lengths


def test_advantages_depend_on_their_group_alone():
    steps = make_batches([group(0, [5.0, 5.0]), group(1, [0.0, 1.0])], config())
    samples = [s for batch in steps[0] for m in batch.micro_batches for s in m]
    assert sorted(s.advantage for s in samples) == pytest.approx(
        [-0.70710578, 0.0, 0.0, 0.70710578]
    )


@pytest.mark.parametrize(
    ("estimator", "expected"), [("rloo", [-1.0, 1.0]), ("reinforce_plus_plus_baseline", None)]
)
def test_the_configured_estimator_computes_the_advantages(estimator, expected):
    settings = config(grpo={"advantage_estimator": estimator})
    steps = make_batches([group(0, [0.0, 1.0]), group(1, [0.0, 1.0])], settings)
    found = sorted(
        {round(s.advantage, 6) for batch in steps[0] for m in batch.micro_batches for s in m}
    )
    # whitened over tokens, not over samples
    assert found == expected if expected else sum(found) != 0 and len(found) == 2


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_without_normalization_rewards_are_the_advantages(estimator):
    settings = config(
        grpo={"advantage_estimator": estimator, "disable_rewards_normalization": True}
    )
    steps = make_batches([group(0, [0.0, 1.0]), group(1, [3.0, -1.0])], settings)
    found = sorted(s.advantage for batch in steps[0] for m in batch.micro_batches for s in m)
    assert found == [-1.0, 0.0, 1.0, 3.0]


def test_an_answer_without_a_reward_is_in_neither_the_baseline_nor_the_loss():
    """Its grading was lost, so the group has one sample less and the denominators are smaller."""
    of_four = group(0, [1.0, 0.0, 1.0, 1.0])
    of_three = SampleGroup(0, of_four.samples[:3])
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 4}
    (ranks,) = make_batches([of_three, group(1, [1.0, 0.0, 0.0, 0.0])], config(rollout=rollout))
    trained = [
        sample for batch in ranks for micro_batch in batch.micro_batches for sample in micro_batch
    ]
    counting = [sample for sample in trained if any(sample.loss_mask)]
    assert ranks[0].num_samples == len(counting) == 7
    assert (
        ranks[0].num_tokens
        == sum(sample.response_length for sample in counting)
        == 3 + 4 + 5 + 3 + 4 + 5 + 6
    )
    expected = [*grpo_advantages([1.0, 0.0, 1.0]), *grpo_advantages([1.0, 0.0, 0.0, 0.0])]
    assert sorted(sample.advantage for sample in counting) == sorted(expected)


def test_an_interleaved_pipeline_gets_micro_batches_in_whole_rounds():
    perf = {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "micro_batch_size": 3,
    }
    (ranks,) = make_batches([group(i, [0.0, 1.0]) for i in range(4)], config(perf=perf))
    assert [len(batch.micro_batches) for batch in ranks] == [4]


def test_rollout_metrics_are_those_of_the_samples():
    metrics = rollout_metrics([group(0, [1.0, 0.0]), group(1, [1.0, 1.0], finish="length")])
    assert metrics["reward/mean"] == 0.75
    assert metrics["rollout/zero_std_groups"] == 1
    assert metrics["rollout/truncated_frac"] == 0.5
    assert metrics["rollout/num_tokens"] == 3 + 4 + 3 + 4


def test_log_prob_passes_with_a_separate_limit_have_separate_groups():
    """Each rank's samples occur once, in fewer groups than micro-batches.

    The number of groups is the same on both ranks.
    """
    limits = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8,
        "log_probs_max_tokens_per_gpu": 24,
    }
    (ranks,) = make_batches([group(i, [0.0, 1.0]) for i in range(4)], config(perf=limits))
    for batch in ranks:
        samples = [sample for micro_batch in batch.micro_batches for sample in micro_batch]
        assert sorted(i for one in batch.log_prob_groups for i in one) == list(range(len(samples)))
        assert all(
            sum(len(samples[i].token_ids) for i in one) <= 24 for one in batch.log_prob_groups
        )
        assert len(batch.log_prob_groups) < len(batch.micro_batches)
    assert len({len(batch.log_prob_groups) for batch in ranks}) == 1
    (ranks,) = make_batches([group(i, [0.0, 1.0]) for i in range(4)], config())
    assert all(batch.log_prob_groups == () for batch in ranks)


def test_balance_data_evens_out_work_and_without_it_samples_are_dealt_round_robin():
    groups = [
        group(0, [0.0, 1.0], length=40),
        *(group(i, [0.0, 1.0], length=20 // i) for i in range(1, 4)),
    ]

    def tokens(balance):
        (ranks,) = make_batches(groups, config(perf={"balance_data": balance}), break_even=100.0)
        return [sum(len(s.token_ids) for m in batch.micro_batches for s in m) for batch in ranks]

    assert abs(tokens(True)[0] - tokens(True)[1]) < abs(tokens(False)[0] - tokens(False)[1])


def test_context_parallel_padding_counts_against_the_limit():
    """Two ranks split sequences in four, so 5 and 6 tokens are padded to 8; two fit into 2 x 9."""
    perf = {"context_parallel_size": 2, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 9}
    (ranks,) = make_batches([group(i, [0.0, 1.0]) for i in range(4)], config(perf=perf))
    assert [[len(m) for m in batch.micro_batches] for batch in ranks] == [[2, 2, 2, 2]]


def test_long_sequences_include_the_cost_of_the_models_attention():
    """Compare the break-even length with that of Qwen2.5-7B.

    It has 7.07e9 parameters without the embedding, and 28 layers of attention of width 3584. With
    experts, only the active parameters count.
    """
    qwen = dict(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=3584,
        num_attention_heads=28,
        num_hidden_layers=28,
        num_key_value_heads=4,
        vocab_size=152064,
    )
    assert model_break_even(qwen | {"intermediate_size": 18944}) == pytest.approx(
        7.07e9 / (28 * 3584), rel=1e-2
    )
    sparse = qwen | dict(architectures=["Qwen3MoeForCausalLM"], norm_topk_prob=True, head_dim=128)
    sparse |= dict(
        intermediate_size=1, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=18944 // 8
    )
    assert model_break_even(sparse) == pytest.approx(7.07e9 / (28 * 3584), rel=1e-2)


def with_routes(given, *, num_unknown=0):
    """Return the group with routes of 3 layers and 2 experts for all tokens but the last.

    The routes of the first ``num_unknown`` tokens are unknown (255).
    """
    samples = []
    for scored in given.samples:
        length = len(scored.sample.prompt_ids) + len(scored.sample.response_ids) - 1
        array = np.random.default_rng(scored.sample.index).integers(
            0, 200, (length, 3, 2), dtype=np.uint8
        )
        array[:num_unknown] = 255
        samples.append(replace(scored, sample=replace(scored.sample, routes=RouteColumn(array))))
    return replace(given, samples=tuple(samples))


def test_a_group_of_other_prompts_is_counted_and_shares_only_equal_tokens():
    """Such as episodes whose observations differ."""
    prompt = (*range(20),)

    def of(number, *prompts):
        samples = [
            Sample(number, i, tokens, (50 + i,) * 5, (-0.5,) * 5, "", "stop", 0)
            for i, tokens in enumerate(prompts)
        ]
        return SampleGroup(number, tuple(ScoredSample(sample, 0.0) for sample in samples))

    groups = [of(0, prompt, prompt), of(1, (7, *prompt), (8, *prompt))]
    perf = {"share_prefix": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 1000}
    given = config(perf=perf, cluster={"actor_num_gpus_per_node": 1, "num_gpus_per_node": 4})
    steps = deal(rollout_samples(groups, given.grpo), given)
    assert prefix_metrics(groups, steps) == {
        "train/shared_tokens_frac": 20 / (2 * 25 + 2 * 26),
        "train/groups_of_several_prompts": 1,
    }
    (batch,) = steps[0].batches
    other = [s for micro in batch.micro_batches for s in micro if s.token_ids[0] in (7, 8)]
    shared, whole = (pack(tuple(other), RowLayout(share_prefix=each)) for each in (True, False))
    assert shared.key_rows is None and shared.input_ids.equal(whole.input_ids)


def test_routes_reach_the_trainer_with_their_sample():
    groups = [with_routes(group(i, [1.0, 0.0])) for i in range(4)]
    wanted = {scored.sample.routes for each in groups for scored in each.samples}
    (ranks,) = make_batches(groups, config())
    samples = [
        sample for batch in ranks for micro_batch in batch.micro_batches for sample in micro_batch
    ]
    assert {sample.routes for sample in samples} == wanted
    assert all(len(sample.routes) == len(sample.token_ids) - 1 for sample in samples)


def test_metrics_have_the_size_of_routes_and_the_fraction_of_unknown_ones():
    metrics = rollout_metrics([with_routes(group(0, [1.0, 0.0]), num_unknown=1)])
    assert metrics["rollout/routes_bytes_per_token"] == 6
    # prompts of 2, answers of 3 and 4 tokens
    assert metrics["rollout/routes_unknown_frac"] == pytest.approx(2 / 9)
    assert "rollout/routes_bytes_per_token" not in rollout_metrics([group(0, [1.0, 0.0])])


def test_sampling_masks_are_sent_only_with_their_setting_and_then_for_every_sample():
    """Without the setting, some samples of a plug-in may have a mask; it is ignored."""
    sets = TokenSetColumn.of([(1, 2), (3,)])
    samples = [Sample(0, index, (5,), (1, 3), (-0.5, -0.5), "", "stop", 0) for index in range(2)]
    some = [samples[0], replace(samples[1], sampling_mask=sets)]
    every = [replace(sample, sampling_mask=sets) for sample in samples]

    def sent(of, **grpo):
        group = SampleGroup(0, tuple(ScoredSample(sample, 1.0) for sample in of))
        return [
            one.sampling_mask
            for one in rollout_samples([group], load([], {"grpo": grpo}).config.grpo)
        ]

    assert sent(some) == [None, None]
    assert sent(every, use_rollout_sampling_mask=True) == [sets, sets]
    with pytest.raises(
        DataError, match="needs the sampling mask of every sample, and one has none"
    ):
        sent(some, use_rollout_sampling_mask=True)


def test_fewer_answers_than_optimizer_steps_are_one_step_each():
    """Answers whose grades were lost are left out of their group."""
    batch = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_steps_per_rollout": 4}
    steps = make_batches([group(0, [1.0, 0.0]), group(1, [1.0])], config(rollout=batch))
    assert [ranks[0].num_samples for ranks in steps] == [1, 1, 1]
