"""Evaluation inherits from the rollout what it does not set itself."""

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
    inherited = rollout_sampling(ROLLOUT, (1,))
    assert eval_sampling(EvalConfig(), ROLLOUT, (1,)) == inherited
    greedy = eval_sampling(EvalConfig(eval_temperature=0.0, eval_max_response_len=5, eval_top_p=0.5), ROLLOUT, (1,))
    assert (greedy.temperature, greedy.max_new_tokens, greedy.top_p) == (0.0, 5, 0.5)
    assert (greedy.top_k, greedy.stop, greedy.stop_token_ids) == (20, ("\n",), (1, 4, 9))


def test_nothing_is_sent_for_no_stops() -> None:
    sent = SamplingParams(max_new_tokens=3).to_sglang()
    assert (sent["stop"], sent["stop_token_ids"], sent["max_new_tokens"]) == (None, None, 3)
