"""Names of environments, and the choice of one for each prompt."""

from __future__ import annotations

from collections import Counter

import pytest

from rlpost.errors import ConfigError, DataError
from rlpost.extensions.agents.env_names import env_of, parse_env, parse_envs


@pytest.mark.parametrize(
    ("word", "label", "kind", "target"),
    [
        ("my.envs:Calc", "Calc", "own", "my.envs:Calc"),
        ("rlpost.agents.x:Game", "Game", "own", "rlpost.extensions.agents.x:Game"),
        ("a/b/envs.py:Calc", "Calc", "own", "a/b/envs.py:Calc"),
        ("calc=my.envs:Other", "calc", "own", "my.envs:Other"),
        ("verifiers:wordle", "verifiers-wordle", "verifiers", "wordle"),
        ("verifiers:owner/wordle", "verifiers-wordle", "verifiers", "owner/wordle"),
        ("openenv:http://n1:8000", "openenv-n1-8000", "openenv", "http://n1:8000"),
        ("tau2:airline", "tau2-airline", "tau2", "airline"),
        ("nemogym:http://n1:9", "nemogym-n1-9", "nemogym", "http://n1:9"),
        ("harbor:/data/tb2/", "harbor-tb2", "harbor", "/data/tb2/"),
    ],
)
def test_a_value_of_env_names_an_environment(word, label, kind, target):
    found = parse_env(word)
    assert (found.label, found.kind, found.target) == (label, kind, target)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("verifier:wordle", "did you mean 'verifiers'?"),
        ("wordle", "names no environment"),
        ("verifiers:", "names no environment"),
        ("my.envs:not a name", "neither pkg.mod:Class"),
        ("a b:Class", "neither pkg.mod:Class"),
    ],
)
def test_a_value_that_names_no_environment_is_refused_with_a_remedy(word, told):
    with pytest.raises(ConfigError, match="--env") as caught:
        parse_env(word)
    assert told in str(caught.value)


def test_environments_need_distinct_labels():
    with pytest.raises(ConfigError, match="two environments have the label Calc"):
        parse_envs(["a.b:Calc", "c.d:Calc"])
    assert [each.label for each in parse_envs(["a.b:Calc", "two=c.d:Calc"])] == ["Calc", "two"]


def draw(prompt_id: int, *, seed: int = 42, metadata=None) -> str:
    return env_of(
        ("a", "b", "c"),
        (1.0, 2.0, 5.0),
        metadata=metadata or {},
        key="env",
        prompt_id=prompt_id,
        seed=seed,
    )


def test_the_draw_follows_the_weights_and_depends_on_seed_and_prompt_alone():
    drawn = [draw(number) for number in range(8000)]
    shares = Counter(drawn)
    assert shares["a"] / 8000 == pytest.approx(1 / 8, abs=0.02)
    assert shares["b"] / 8000 == pytest.approx(2 / 8, abs=0.02)
    assert drawn[5000:] == [draw(number) for number in range(5000, 8000)]  # as after a resume
    assert drawn[:100] != [draw(number, seed=43) for number in range(100)]


def test_a_prompt_that_names_its_environment_gets_it():
    assert {draw(number, metadata={"env": "a"}) for number in range(50)} == {"a"}
    with pytest.raises(DataError, match="'env' in its metadata is 'd', which --env does not have"):
        draw(7, metadata={"env": "d"})
