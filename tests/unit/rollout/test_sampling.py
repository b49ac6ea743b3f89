"""Evaluation inherits settings from the rollout that it does not set itself."""

from rlpost.config.eval_sets import EvalSet
from rlpost.config.groups.eval import EvalConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.rollout.sampling import SamplingParams, eval_sampling, rollout_sampling

ROLLOUT = RolloutConfig(
    rollout_max_response_len=32,
    rollout_temperature=0.7,
    rollout_top_p=0.9,
    rollout_top_k=20,
    rollout_stop=("\n",),
    rollout_stop_token_ids=(9, 4),
)


def test_the_end_tokens_of_the_model_always_stop() -> None:
    assert rollout_sampling(ROLLOUT, (1, 9)).stop_token_ids == (1, 4, 9)


def test_evaluation_sets_or_inherits_each_value() -> None:
    """An evaluation set overrides [eval], which overrides the rollout."""
    plain = EvalSet(name="a", path="b")
    inherited = rollout_sampling(ROLLOUT, (1,))
    assert eval_sampling(plain, EvalConfig(), ROLLOUT, (1,)) == inherited
    evaluation = EvalConfig(eval_temperature=0.0, eval_max_response_len=5, eval_top_p=0.5)
    greedy = eval_sampling(plain, evaluation, ROLLOUT, (1,))
    assert (greedy.temperature, greedy.max_new_tokens, greedy.top_p) == (0.0, 5, 0.5)
    assert (greedy.top_k, greedy.stop, greedy.stop_token_ids) == (20, ("\n",), (1, 4, 9))
    special = EvalSet(
        name="a",
        path="b",
        temperature=0.3,
        max_response_len=7,
        stop=(),
        stop_token_ids=(3,),
        top_k=-1,
    )
    own = eval_sampling(special, evaluation, ROLLOUT, (1,))
    assert own == SamplingParams(7, 0.3, 0.5, -1, (), (1, 3), seed=ROLLOUT.rollout_seed)


def test_a_lower_bound_of_evaluation_is_sent_and_training_has_none() -> None:
    made = eval_sampling(
        EvalSet(name="a", path="b"), EvalConfig(eval_min_new_tokens=4), ROLLOUT, ()
    )
    assert made.to_sglang()["min_new_tokens"] == 4
    assert "min_new_tokens" not in rollout_sampling(ROLLOUT, ()).to_sglang()


def test_without_stops_null_is_sent() -> None:
    sent = SamplingParams(max_new_tokens=3).to_sglang()
    assert (sent["stop"], sent["stop_token_ids"], sent["max_new_tokens"]) == (None, None, 3)
