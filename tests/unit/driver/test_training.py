"""The training stage with actors that record their calls."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rlpost.columns import FloatColumn
from rlpost.config.tree import Config
from rlpost.driver.calls import Calls
from rlpost.driver.preemption import StopRequest
from rlpost.driver.training import Training
from rlpost.driver.worker_groups import ActorGroup
from rlpost.driver.workers import Stored
from rlpost.errors import ConfigError, DataError, HalfTrained, Preempted, TrainingError
from rlpost.observe.progress.stragglers import STEPS
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.types import Sample, SampleGroup, ScoredSample, StepPlace, StepResult

FRESH = PolicyVersions()
HEALTHY = {"train/ppo_kl": 0.0, "train/grad_norm": 1.0, "train/rollout_logprob_abs_diff": 0.0}


def value_of(argument):
    """Return a stored value, or the argument itself."""
    return argument.reference if isinstance(argument, Stored) else argument


class Actors:
    """Two pipeline stages of one data-parallel rank; only the last returns log-probs.

    They are -1 for the policy and -2 for the reference model.
    """

    def __init__(self, metrics=HEALTHY):
        self.metrics = metrics
        self.calls = []
        self.stored = []

    async def put(self, value):
        self.stored.append(value)
        return Stored(value)

    async def get(self, stored):
        return stored.reference

    async def call_each(self, method, arguments):
        values = [tuple(map(value_of, own)) for own in arguments]
        self.calls.append((method, values))
        return [StepResult(self.metrics)] * len(arguments)

    async def call_each_stored(self, method, arguments):
        self.calls.append((method, [tuple(map(value_of, own)) for own in arguments]))
        value = {
            "compute_logprobs": -1.0,
            "compute_ref_logprobs": -2.0,
            "compute_old_logprobs": -4.0,
            "compute_values": 0.5,
        }[method]
        batch = arguments[-1][0].reference
        return [
            None,
            Stored(
                [
                    [self.of_sample(value, sample) for sample in micro]
                    for micro in batch.micro_batches
                ]
            ),
        ]

    async def call(self, method, *arguments):
        self.calls.append((method, arguments))
        return [None] * 2

    def of_sample(self, value, sample):
        return FloatColumn([value] * sample.response_length)

    def named(self, method):
        return [arguments for name, arguments in self.calls if name == method]

    def trained(self):
        """The samples of all optimizer steps, as the first rank gets them."""
        steps = []
        for (batch, _, advantages, _), *_ in self.named("train_step"):
            changed = batch if advantages is None else batch.with_advantages(advantages)
            steps += changed.samples
        return steps


def groups():
    def sample(prompt, index):
        ids = tuple(range(2 + index))
        mask = (0, *(1,) * (len(ids) - 1))
        return Sample(prompt, index, (1, 2), ids, (-1.0,) * len(ids), "", "stop", 0, loss_mask=mask)

    return [
        SampleGroup(prompt, tuple(ScoredSample(sample(prompt, i), float(i)) for i in range(2)))
        for prompt in range(2)
    ]


def train(
    actors,
    *,
    num_steps=1,
    is_fresh=True,
    stop=None,
    given=None,
    distillation=None,
    critic=None,
    rollouts=1,
    versions=FRESH,
    **grpo,
):
    config = Config.model_validate(
        {
            "cluster": {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2},
            "perf": {"pipeline_model_parallel_size": 2},
            "rollout": {
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                "num_steps_per_rollout": num_steps,
            },
            "grpo": grpo,
            "distillation": distillation or {},
            "critic": critic or {},
        }
    )
    stop = stop or StopRequest(Path("/nowhere"))
    group = ActorGroup(actors)
    training = Training(
        config,
        group,
        [0, 0],
        calls=Calls(group, stop),
        is_fresh=is_fresh,
        break_even=1e9,
    )

    async def all_rollouts():
        for rollout in range(1, rollouts + 1):
            metrics = await training.train(given or groups(), rollout, versions)
        return metrics

    return asyncio.run(all_rollouts())


def test_one_step_per_rollout_needs_no_log_probs_and_several_compute_them_before_the_first():
    one, several = Actors(), Actors()
    train(one)
    train(several, num_steps=2)
    assert [name for name, _ in one.calls] == ["train_step"]
    assert [name for name, _ in several.calls] == ["compute_logprobs"] * 2 + ["train_step"] * 2
    assert one.named("train_step")[0][0][1] is None
    assert several.named("train_step")[0][1][1], "the last stage gets its own log-probs back"


@pytest.mark.parametrize("num_steps", [1, 2])
def test_with_a_kept_old_policy_even_one_step_is_compared_with_its_log_probs(num_steps):
    actors = Actors(HEALTHY | {"train/ppo_kl": 0.5})  # the policy has moved since
    train(actors, num_steps=num_steps, keep_old_actor=True)
    named = [name for name, _ in actors.calls]
    assert named == ["compute_old_logprobs"] * num_steps + ["train_step"] * num_steps
    _, (batch, old, _, _) = actors.named("train_step")[0]
    assert old == [[actors.of_sample(-4.0, one) for one in micro] for micro in batch.micro_batches]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_penalty_in_the_reward_reaches_the_right_sample(num_steps):
    """KL (k1) is 1 per token, so a sample of n trained tokens loses 0.1 n of its reward.

    The reward of a sample is its index.
    """
    actors = Actors()
    metrics = train(
        actors,
        num_steps=num_steps,
        kl_coef=0.1,
        kl_loss_type="k1",
        disable_grpo_std_normalization=True,
    )
    samples = actors.trained()
    difference = (1 - 0.2) - (0 - 0.1)
    expected = {2: -difference / 2, 3: difference / 2}
    assert len(samples) == 4
    assert [s.advantage for s in samples] == pytest.approx(
        [expected[s.response_length] for s in samples]
    )
    assert metrics["train/reward_kl"] == pytest.approx(1.0)


def test_the_penalty_of_a_masked_answer_counts_in_the_baseline_and_not_in_the_metric():
    """The longer answer is cut off: its loss is masked, and its reward still loses 0.1 a token."""
    given = []
    for group in groups():
        short, long = group.samples
        cut = replace(long, sample=replace(long.sample, finish_reason="length"))
        given.append(replace(group, samples=(short, cut)))
    actors, options = Actors(), {"kl_coef": 0.1, "kl_loss_type": "k1"}
    options |= {"truncated_answers": "mask", "disable_grpo_std_normalization": True}
    metrics = train(actors, given=given, **options)
    advantages = {s.response_length: s.advantage for s in actors.trained()}
    # rewards 0 and 1, with one and two tokens of the policy
    assert advantages[2] == pytest.approx(-0.1 - (-0.1 + 0.8) / 2)
    assert [s.loss_mask.total() for s in actors.trained() if s.response_length == 3] == [0, 0]
    assert metrics["train/reward_kl"] == pytest.approx(1.0)


def test_every_step_gets_its_place_and_old_log_probs_are_those_of_a_version():
    """Two answers are graded, so that there are two steps instead of four."""
    actors, versions = Actors(), PolicyVersions(interval=2, start=5, kept=4, ref_interval=3)
    options = {"num_steps": 4, "keep_old_actor": True, "rollouts": 6, "versions": versions}
    train(actors, given=groups()[:1], **options)
    places = [own[0][3] for own in actors.named("train_step")][-4:]
    assert places == [
        StepPlace(5, 1, 2, old_version=4), StepPlace(5, 2, 2, old_version=4),
        StepPlace(6, 1, 2, old_version=6, updates_reference=True),
        StepPlace(6, 2, 2, old_version=6, updates_reference=True),
    ]  # fmt: skip
    assert [own[0][1] for own in actors.named("compute_old_logprobs")][-2:] == [4, 4]


def test_a_loss_that_uses_no_advantages_gets_zeros():
    actors, off = Actors(), {"disable_compute_advantages_and_returns": True}
    train(actors, loss_type="custom_loss", custom_loss_function_path="a.b", **off)
    assert [sample.advantage for sample in actors.trained()] == [0.0] * 4


def test_returns_to_go_give_one_advantage_per_token():
    actors = Actors()
    train(actors, kl_coef=0.1, kl_loss_type="k1", advantage_estimator="reinforce_plus_plus")
    samples = actors.trained()
    assert all(len(s.advantages) == s.response_length for s in samples)
    longest = max(samples, key=lambda sample: sample.response_length)
    trained = [
        advantage
        for advantage, is_trained in zip(longest.advantages, longest.loss_mask, strict=True)
        if is_trained
    ]
    assert trained == sorted(set(trained)), "later tokens have less before them"


def test_warnings_are_logged_and_errors_end_the_run(caplog):
    train(Actors(HEALTHY | {"train/rollout_logprob_abs_diff": 0.5}))
    assert "train/rollout_logprob_abs_diff = 0.5" in caplog.text
    with pytest.raises(TrainingError, match="train/ref_kl"):
        train(Actors(HEALTHY | {"train/ref_kl": 0.5}))
    train(Actors(HEALTHY | {"train/ref_kl": 0.5}), is_fresh=False)


class Stopping(Actors):
    """Ranks that request a stop in the n-th call of a method, optionally with a near deadline."""

    def __init__(self, path, stop_in, *, deadline="N/A"):
        super().__init__()
        self.path, self.stop_in, self.deadline = path, stop_in, deadline

    async def call_each(self, method, arguments):
        found = await super().call_each(method, arguments)
        await self.stopping(method)
        return found

    async def call_each_stored(self, method, arguments):
        found = await super().call_each_stored(method, arguments)
        await self.stopping(method)
        return found

    async def stopping(self, method):
        if (method, len(self.named(method))) == self.stop_in:
            self.path.write_text(f'{{"reason": "test", "deadline": "{self.deadline}"}}')
            if self.deadline != "N/A":
                await asyncio.sleep(60)


@pytest.mark.parametrize(
    "stop_in", [("compute_logprobs", 1), ("compute_logprobs", 2), ("compute_ref_logprobs", 2)]
)
def test_a_stop_before_the_first_optimizer_step_leaves_before_the_next_pass(tmp_path, stop_in):
    actors = Stopping(tmp_path / "STOP", stop_in)
    with pytest.raises(Preempted) as found:
        train(actors, num_steps=2, kl_coef=0.1, stop=StopRequest(tmp_path / "STOP"))
    assert not isinstance(found.value, HalfTrained)
    assert not actors.named("train_step")
    assert actors.calls[-1][0] == stop_in[0]


def test_after_the_first_optimizer_step_a_stop_completes_the_others_if_time_permits(tmp_path):
    """Between two steps of a rollout, the weights match no state that a run can resume from."""
    actors = Stopping(tmp_path / "STOP", ("train_step", 1))
    train(actors, num_steps=2, stop=StopRequest(tmp_path / "STOP"))
    assert len(actors.named("train_step")) == 2


def test_a_deadline_within_a_later_step_leaves_weights_that_must_not_be_saved(tmp_path):
    actors = Stopping(tmp_path / "STOP", ("train_step", 2), deadline="1")
    with pytest.raises(HalfTrained, match="train_step does not end before the deadline"):
        train(actors, num_steps=2, stop=StopRequest(tmp_path / "STOP"))


class Uneven(Actors):
    """Two data-parallel ranks on two hosts, of which the second takes twice as long."""

    async def call_each(self, method, arguments):
        await super().call_each(method, arguments)
        return [StepResult(self.metrics, own_s=seconds) for seconds in (1.0, 2.0)]


async def test_a_host_that_stays_slow_is_in_the_metrics_and_proposed_for_exclusion(
    tmp_path, caplog
):
    config = Config.model_validate(
        {
            "cluster": {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1},
            "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        }
    )
    events = []
    actors = ActorGroup(Uneven())
    training = Training(
        config,
        actors,
        [0, 1],
        calls=Calls(actors, StopRequest(tmp_path / "STOP")),
        is_fresh=True,
        break_even=1e9,
        hosts=["n01", "n02"],
        record=lambda event, **details: events.append((event, details["host"])),
    )
    for _ in range(STEPS):
        assert not events
        metrics = await training.train(groups(), 1, PolicyVersions())
    assert metrics["perf/straggler_rank"] == 1
    assert metrics["perf/straggler_node_peer@1"] == metrics["perf/straggler_peer_max"] > 1.5
    assert events == [("slow_host", "n02")]
    assert "--exclude n02" in caplog.text


def scored(groups, logprob=-3.0):
    """The groups with a teacher's log-prob of each response token."""
    columns = [
        [(logprob,) * len(each.sample.response_ids) for each in group.samples] for group in groups
    ]
    return [
        replace(
            group,
            samples=tuple(
                replace(each, sample=replace(each.sample, teacher_logprobs=column))
                for each, column in zip(group.samples, of_group, strict=True)
            ),
        )
        for group, of_group in zip(groups, columns, strict=True)
    ]


def distilling(actors, groups, *, num_steps=1, grpo=None, **distillation):
    """Train on groups with a teacher; return the samples as trained, and the metrics."""
    given = {"use_opd": True, "opd_teacher_url": "http://t"} | distillation
    metrics = train(actors, num_steps=num_steps, given=groups, distillation=given, **(grpo or {}))
    return actors.trained(), metrics


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_divergence_from_the_teacher_is_subtracted_at_each_trained_token(num_steps):
    """Policy -1, teacher -3: 2 nats per token, subtracted after the baseline; 0 where masked."""
    actors = Actors()
    samples, metrics = distilling(
        actors,
        scored(groups()),
        num_steps=num_steps,
        opd_kl_coef=0.25,
        grpo={"disable_grpo_std_normalization": True},
    )
    assert metrics["train/opd_reverse_kl"] == pytest.approx(2.0)
    base = {2: -0.5, 3: 0.5}
    for sample in samples:
        own = base[sample.response_length]
        expected = [own - 0.5 * kept for kept in sample.loss_mask]
        assert list(sample.advantages) == pytest.approx(expected)
    assert len(actors.named("compute_logprobs")) == num_steps


def test_the_teacher_alone_leaves_nothing_of_the_rewards():
    samples, _ = distilling(Actors(), scored(groups()), opd_alone=True)
    assert all(
        list(sample.advantages) == [-2.0 * kept for kept in sample.loss_mask] for sample in samples
    )


def test_with_the_log_probs_of_the_engines_nothing_needs_a_pass_of_the_trainer():
    actors = Actors()
    samples, metrics = distilling(
        actors, scored(groups(), -1.5), opd_alone=True, grpo={"use_rollout_logprobs": True}
    )
    assert [name for name, _ in actors.calls] == ["train_step"]
    assert metrics["train/opd_reverse_kl"] == pytest.approx(0.5)
    assert list(samples[0].advantages) == [-0.5 * kept for kept in samples[0].loss_mask]
    with pytest.raises(DataError, match="no log-probs of the teacher"):
        distilling(Actors(), groups())


def test_normalized_advantages_include_the_divergence():
    samples, _ = distilling(Actors(), scored(groups()), grpo={"normalize_advantages": True})
    trained = [
        advantage
        for sample in samples
        for advantage, kept in zip(sample.advantages, sample.loss_mask, strict=True)
        if kept
    ]
    assert sum(trained) == pytest.approx(0.0, abs=1e-5)
    assert sum(a * a for a in trained) / len(trained) == pytest.approx(1.0, rel=1e-4)


def test_the_divergence_in_the_loss_is_left_to_the_actors():
    actors = Actors()
    samples, metrics = distilling(actors, scored(groups()), opd_form="loss", opd_alone=True)
    assert [name for name, _ in actors.calls] == ["train_step"]
    assert all(sample.advantage == 0.0 for sample in samples)
    assert "train/opd_reverse_kl" not in metrics, "the actors report it"


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_critic_is_trained_before_the_policy_on_values_from_before_both(num_steps):
    actors = Actors()
    metrics = train(actors, num_steps=num_steps, advantage_estimator="ppo", lambd=0.5)
    names = [name for name, _ in actors.calls]
    logprobs = ["compute_logprobs"] * 2 if num_steps == 2 else []
    values = ["compute_values"] * num_steps
    assert names == [*logprobs, *values, *["train_critic"] * num_steps, *["train_step"] * num_steps]
    steps = zip(actors.named("train_critic"), actors.named("train_step"), strict=True)
    for ((batch, _, returns), last_stage), ((own, _, advantages, _), _) in steps:
        assert batch == own
        assert last_stage[1], "the last stage gets its values back"
        for sample, target, advantage in zip(batch.samples, returns, advantages, strict=True):
            # values are 0.5; the reward (the index) is at the last token; the first token is masked
            reward = sample.response_length - 2.0
            expected = [reward - 0.5]
            for _ in range(sample.response_length - 2):
                expected.insert(0, 0.5 * expected[0])
            assert list(advantage) == pytest.approx([0.0, *expected])
            assert list(target) == pytest.approx([0.0, *(0.5 + each for each in expected)])
    assert metrics["train/value_mean"] == 0.5


def test_penalties_are_part_of_the_critics_rewards():
    """KL (k1) is 1 per token, so a return is the reward minus 0.1 per remaining token."""
    actors = Actors()
    metrics = train(actors, advantage_estimator="ppo", kl_coef=0.1, kl_loss_type="k1")
    ((batch, _, returns), _) = actors.named("train_critic")[0]
    for sample, target in zip(batch.samples, returns, strict=True):
        length = sample.response_length
        expected = [length - 2.0 - 0.1 * (length - place) for place in range(1, length)]
        assert list(target)[1:] == pytest.approx(expected)
    assert metrics["train/reward_kl"] == pytest.approx(1.0)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_with_a_critic_the_teacher_changes_the_advantages_and_not_the_returns(num_steps):
    """With policy -1 and teacher -3, A_t is that of GAE minus 0.25 (log p - log q).

    The critic learns the rewards alone, as in slime.
    """
    plain, actors = Actors(), Actors()
    train(plain, num_steps=num_steps, advantage_estimator="ppo", lambd=0.5)
    samples, metrics = distilling(
        actors,
        scored(groups()),
        num_steps=num_steps,
        opd_kl_coef=0.25,
        grpo={"advantage_estimator": "ppo", "lambd": 0.5},
    )
    assert metrics["train/opd_reverse_kl"] == pytest.approx(2.0)
    assert len(samples) == 4
    for sample in samples:
        # as in the test of GAE: values are 0.5, the reward is the index, the first token is masked
        from_end = [
            (sample.response_length - 2.5) * 0.5**n for n in range(sample.response_length - 1)
        ]
        expected = [0.0, *(each - 0.25 * 2.0 for each in reversed(from_end))]
        assert list(sample.advantages) == pytest.approx(expected)
    returns = [
        [list(target) for (_, _, targets), _ in each.named("train_critic") for target in targets]
        for each in (actors, plain)
    ]
    assert returns[0] == returns[1]
    names = [name for name, _ in actors.calls]
    assert names.index("compute_logprobs") < names.index("train_critic")


def test_with_a_critic_the_form_loss_changes_neither_advantages_nor_returns():
    plain, actors = Actors(), Actors()
    train(plain, advantage_estimator="ppo", lambd=0.5)
    distilling(
        actors, scored(groups()), opd_form="loss", grpo={"advantage_estimator": "ppo", "lambd": 0.5}
    )
    for name, position in (("train_critic", 2), ("train_step", 2)):
        ours, theirs = ([list(map(list, call[0][position])) for call in each.named(name)]
                        for each in (actors, plain))  # fmt: skip
        assert ours == theirs


def test_the_first_rollouts_may_train_the_critic_alone():
    actors = Actors()
    train(
        actors,
        num_steps=2,
        rollouts=3,
        advantage_estimator="ppo",
        critic={"num_critic_only_steps": 2},
    )
    names = [name for name, _ in actors.calls]
    alone = ["compute_values"] * 2 + ["train_critic"] * 2
    assert names[:10] == [*alone, "old_policy.skip"] * 2
    assert names[10:] == ["compute_logprobs"] * 2 + alone + ["train_step"] * 2
    assert actors.named("old_policy.skip") == [(1,), (2,)]


def test_a_stop_after_the_critics_first_step_lets_the_others_follow(tmp_path):
    actors = Stopping(tmp_path / "STOP", ("train_critic", 1))
    train(actors, advantage_estimator="ppo", stop=StopRequest(tmp_path / "STOP"))
    assert len(actors.named("train_step")) == 1
    actors = Stopping(tmp_path / "STOP2", ("compute_values", 1))
    with pytest.raises(Preempted) as found:
        train(actors, advantage_estimator="ppo", stop=StopRequest(tmp_path / "STOP2"))
    assert not isinstance(found.value, HalfTrained)
    assert not actors.named("train_critic")


PLUGINS = Path(__file__).parents[1] / "compat/plugins.py"


@pytest.mark.usefixtures("slime_adapters")
@pytest.mark.parametrize("estimator", ["grpo", "cispo"])
def test_post_processed_rewards_of_slime_are_the_advantages(estimator):
    """Rewards are 0 and 1 and lengths 2 and 3, so advantages are 2 r + length, with no baseline."""
    actors = Actors()
    path = f"{PLUGINS}:post_process"
    metrics = train(actors, advantage_estimator=estimator, custom_reward_post_process_path=path)
    found = {sample.response_length: sample.advantage for sample in actors.trained()}
    assert found == {2: 2.0, 3: 5.0}
    assert metrics["reward/mean"] == 0.5 and metrics["reward/shaped_mean"] == 3.5


@pytest.mark.usefixtures("slime_adapters")
def test_a_critic_learns_post_processed_rewards():
    actors = Actors()
    path = f"{PLUGINS}:post_process"
    train(actors, advantage_estimator="ppo", custom_reward_post_process_path=path)
    ((batch, _, returns), _) = actors.named("train_critic")[0]
    for sample, target in zip(batch.samples, returns, strict=True):
        assert list(target)[-1] == pytest.approx({2: 2.0, 3: 5.0}[sample.response_length])


@pytest.mark.usefixtures("slime_adapters")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wrongly", "return two lists, the raw rewards and those to train"),
        ("to_rows", "return two lists, the raw rewards and those to train"),
        ("to_nan", "return a finite number for each"),
    ],
)
def test_an_invalid_result_of_a_post_process_is_reported_with_its_path(name, text):
    with pytest.raises(ConfigError, match=text):
        train(Actors(), custom_reward_post_process_path=f"{PLUGINS}:post_process_{name}")
