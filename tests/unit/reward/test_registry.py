"""Rewards are found by name and are pure."""

import pytest

from rlpost.errors import ConfigError
from rlpost.reward.registry import REWARDS, reward_function


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
def test_exact_match_compares_all_but_outer_white_space(response: str, label: str | None, reward: float) -> None:
    assert reward_function("exact_match")(response, label, {}) == reward


def test_an_unknown_reward_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as error:
        reward_function("exact_mach")
    assert "did you mean 'exact_match'" in str(error.value)
    assert all(name in str(error.value) for name in REWARDS)
