"""The training stage against actors that only remember what they were asked."""

import asyncio

import pytest

from rlpost.config.tree import Config
from rlpost.errors import TrainingError
from rlpost.orchestration.training import Training
from rlpost.types import Sample, SampleGroup, ScoredSample, StepResult

HEALTHY = {"train/ppo_kl": 0.0, "train/grad_norm": 1.0, "train/rollout_logprob_abs_diff": 0.0}


class Actors:
    """Two pipeline stages of one data-parallel rank; only the last has log-probs: old ones -1, reference ones -2."""

    def __init__(self, metrics=HEALTHY):
        self.metrics = metrics
        self.calls = []

    async def call_each(self, method, arguments):
        self.calls.append((method, arguments))
        if method == "train_step":
            return [StepResult(self.metrics)] * len(arguments)
        value = {"compute_logprobs": -1.0, "compute_ref_logprobs": -2.0}[method]
        batch = arguments[-1][0]
        return [[], [[(value,) * sample.response_length for sample in micro] for micro in batch.micro_batches]]

    def named(self, method):
        return [arguments for name, arguments in self.calls if name == method]


def groups():
    def sample(prompt, index):
        ids = tuple(range(2 + index))
        mask = (0, *(1,) * (len(ids) - 1))
        return Sample(prompt, index, (1, 2), ids, (-1.0,) * len(ids), "", "stop", 0, loss_mask=mask)

    return [
        SampleGroup(prompt, tuple(ScoredSample(sample(prompt, i), float(i)) for i in range(2))) for prompt in range(2)
    ]


def train(actors, *, num_steps=1, is_fresh=True, **grpo):
    config = Config.model_validate(
        {
            "cluster": {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2},
            "perf": {"pipeline_model_parallel_size": 2},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_steps_per_rollout": num_steps},
            "grpo": grpo,
        }
    )
    training = Training(config, actors, [0, 0], is_fresh=is_fresh, break_even=1e9)
    return asyncio.run(training.train(groups()))


def test_one_step_a_rollout_needs_no_log_probs_and_several_take_theirs_before_the_first():
    one, several = Actors(), Actors()
    train(one)
    train(several, num_steps=2)
    assert [name for name, _ in one.calls] == ["train_step"]
    assert [name for name, _ in several.calls] == ["compute_logprobs"] * 2 + ["train_step"] * 2
    assert one.named("train_step")[0][0][1] is None
    assert several.named("train_step")[0][1][1], "the last stage gets its own log-probs back"


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_penalty_in_the_reward_reaches_the_right_sample(num_steps):
    """KL (k1) is 1 a token: a sample of n trained tokens loses n x 0.1 of its reward, which is its index."""
    actors = Actors()
    metrics = train(actors, num_steps=num_steps, kl_coef=0.1, kl_loss_type="k1", disable_grpo_std_normalization=True)
    samples = [s for arguments in actors.named("train_step") for micro in arguments[0][0].micro_batches for s in micro]
    difference = (1 - 0.2) - (0 - 0.1)
    expected = {2: -difference / 2, 3: difference / 2}
    assert len(samples) == 4
    assert [s.advantage for s in samples] == pytest.approx([expected[s.response_length] for s in samples])
    assert metrics["train/reward_kl"] == pytest.approx(1.0)


def test_returns_to_go_are_one_advantage_a_token():
    actors = Actors()
    train(actors, kl_coef=0.1, kl_loss_type="k1", advantage_estimator="reinforce_plus_plus")
    samples = [s for micro in actors.named("train_step")[0][0][0].micro_batches for s in micro]
    assert all(len(s.advantages) == s.response_length for s in samples)
    longest = max(samples, key=lambda sample: sample.response_length)
    assert longest.advantages[0] == longest.advantages[1] < longest.advantages[2], "later tokens have less before them"


def test_warnings_are_logged_and_errors_end_the_run(caplog):
    train(Actors(HEALTHY | {"train/rollout_logprob_abs_diff": 0.5}))
    assert "train/rollout_logprob_abs_diff = 0.5" in caplog.text
    with pytest.raises(TrainingError, match="train/ref_kl"):
        train(Actors(HEALTHY | {"train/ref_kl": 0.5}))
    train(Actors(HEALTHY | {"train/ref_kl": 0.5}), is_fresh=False)
