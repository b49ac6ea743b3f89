"""Rewards are found by name; the prefix ``boxed_`` scores the content of the last box."""

import pytest

from rlpost.config.extensions import text_rewards
from rlpost.errors import ConfigError
from rlpost.tasks.reward.registry import REWARDS, is_isolated, reward_function

NAMES = [*REWARDS, *text_rewards()]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("38", "38", 1.0),
        (" 38\n", "38", 1.0),
        ("38", " 38 ", 1.0),
        ("038", "38", 0.0),
        ("", "38", 0.0),
        ("38", None, 0.0),
    ],
)
def test_exact_match_ignores_only_surrounding_white_space(
    response: str, label: str | None, reward: float
) -> None:
    assert reward_function("exact_match")(response, label, {}) == reward


def test_an_unknown_reward_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError) as error:
        reward_function("exact_mach")
    assert "did you mean 'exact_match'" in str(error.value)
    assert all(name in str(error.value) for name in NAMES)
    assert "remote_rm" in str(error.value)
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        reward_function("boxed_maths")


@pytest.mark.parametrize(
    ("name", "response", "label", "reward"),
    [
        ("boxed_exact_match", r"so \boxed{ 38 }.", "38", 1.0),
        ("boxed_exact_match", "38", "38", 0.0),
        ("boxed_f1", r"The fox said \boxed{the brown fox}", "a quick brown fox", 0.8),
        ("boxed_gpqa", r"A, B or D? \boxed{C} D", "C", 1.0),
        ("boxed_gsm8k", r"\boxed{\$1,200} in 3 days", "1200", 1.0),
        ("boxed_gsm8k", "1200", "1200", 0.0),
        ("boxed_dapo", r"\boxed{42}", "42", 1.0),
        ("boxed_dapo", "Answer: 42", "42", -1.0),
        # no marker of where the answer begins is needed
        (
            "boxed_deepscaler",
            r"\boxed{\dfrac{1}{2}}",
            "0.5",
            1.0,
        ),
        ("boxed_math", r"$1$, no: \boxed{2}", "2", 1.0),
        ("boxed_math", "$2$", "2", 0.0),
    ],
)
def test_the_prefix_boxed_scores_the_content_of_the_last_box(
    name: str, response: str, label: str, reward: float
) -> None:
    assert reward_function(name)(response, label, {}) == pytest.approx(reward)


def test_rewards_that_run_sympy_or_foreign_patterns_are_isolated() -> None:
    assert {name for name in NAMES if is_isolated(name)} == {"deepscaler", "math", "ifeval"}
    assert is_isolated("boxed_math")
    assert not is_isolated("boxed_f1")


def test_a_random_reward_is_0_or_1_and_does_not_use_the_global_generator() -> None:
    import random

    random.seed(3)
    before = random.getstate()
    assert {reward_function("random")("", None, {}) for _ in range(200)} == {0.0, 1.0}
    assert random.getstate() == before
