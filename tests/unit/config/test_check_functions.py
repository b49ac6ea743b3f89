"""Functions of a user's files are looked for on the login node, in files that are read and never
run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.config.checks.functions import SETTINGS, function_problems
from rlpost.config.eval_sets import EvalSet
from rlpost.config.flags import fields, flag, groups
from rlpost.config.groups.base import FunctionPath
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.tasks.reward.grader import check_reward

CODE = """\
import nothing_that_is_installed
from elsewhere import brought as score
try:
    import numpy as np
except ImportError:
    def spare(prompt, sample): pass
if True:
    async def generate(prompt, sample=None): inner = 1
class Callable:
    def method(self): pass
made = lambda hidden: (walrus := hidden)
raise SystemExit("not to be run")
"""


@pytest.mark.parametrize(
    "name", ["score", "generate", "spare", "made", "np", "Callable", "nothing_that_is_installed"]
)
def test_what_a_file_names_is_there(tmp_path, name):
    (tmp_path / "mine.py").write_text(CODE)
    assert function_problems(reward(f"{tmp_path}/mine.py:{name}")) == []


@pytest.mark.parametrize("name", ["scores", "inner", "method", "walrus", "brought"])
def test_what_it_does_not_name_is_a_problem_that_says_what_there_is(tmp_path, name):
    (tmp_path / "mine.py").write_text(CODE)
    (problem,) = function_problems(reward(f"{tmp_path}/mine.py:{name}"))
    assert problem.startswith(
        f"--custom-rm-path {tmp_path}/mine.py:{name}: the file has no function {name}"
    )
    assert "t has Callable, generate, made, nothing_that_is_installed, np, score, spare" in problem
    assert ("did you mean 'score'?" in problem) == (name == "scores")


def test_a_file_that_is_missing_or_broken_is_named_and_a_module_is_left_to_the_nodes(tmp_path):
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "star.py").write_text("from elsewhere import *\n")
    (problem,) = function_problems(reward(f"{tmp_path}/gone.py:f"))
    assert "gone.py:f: no such file" in problem
    with pytest.raises(ConfigError) as refused:
        check_reward(reward(f"{tmp_path}/gone.py:f").rollout)
    assert str(refused.value) == problem, "equal lines are printed once"
    assert (
        "not valid Python: invalid syntax"
        in function_problems(reward(f"{tmp_path}/broken.py:score"))[0]
    )
    assert function_problems(reward(f"{tmp_path}/star.py:anything")) == []
    assert function_problems(reward("package.of_the_nodes.score")) == []


FUNCTIONS = """\
import functools
def one(group): pass
def two(waiting, num_groups): pass
def three(builder, prompt, sampling): pass
def any_number(*arguments, **more): pass
def spare(group, threshold=0.5): pass
def named(group, *, threshold): pass
def slimes(args, samples, **kwargs): pass
def slimes_buffer(args, rollout_id, buffer, num_samples): pass
@functools.cache
def decorated(): pass
"""


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("dynamic_sampling_filter_path", "one", None),
        ("dynamic_sampling_filter_path", "spare", None),
        ("dynamic_sampling_filter_path", "any_number", None),
        ("dynamic_sampling_filter_path", "decorated", None),
        ("dynamic_sampling_filter_path", "slimes", None),
        (
            "dynamic_sampling_filter_path",
            "two",
            "two(waiting, num_groups) cannot be called; use (group)",
        ),
        (
            "dynamic_sampling_filter_path",
            "named",
            "named(group, *, threshold) cannot be called; use (group)",
        ),
        ("buffer_filter_path", "two", None),
        ("buffer_filter_path", "one", "one(group) cannot be called; use (waiting, num_groups)"),
        ("buffer_filter_path", "slimes_buffer", None),
        ("custom_generate_function_path", "three", None),
        ("custom_generate_function_path", "two", "use (builder, prompt, sampling)"),
        (
            "custom_rm_path",
            "slimes",
            "slimes(args, samples, **kwargs) takes the answers to a prompt at once; add --group-rm",
        ),
    ],
)
def test_a_function_that_cannot_be_called_with_what_it_is_given_is_a_problem(
    tmp_path, key, name, words
):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    found = function_problems(
        Config.model_validate({"rollout": {key: f"{tmp_path}/mine.py:{name}"}})
    )
    if words is None:
        assert found == []
    else:
        (problem,) = found
        assert problem.startswith(f"{flag(key)} ") and words in problem


def test_functions_of_an_evaluation_set_are_looked_for_too(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    keys = [
        key
        for key, field in EvalSet.model_fields.items()
        if _has(field, FunctionPath.__metadata__[0])
    ]
    file = tmp_path / "sets.toml"
    lines = [f'{key} = "{tmp_path}/mine.py:lost"' for key in keys]
    file.write_text("\n".join(["[[datasets]]", 'name = "a"', 'path = "a.jsonl"', *lines]))
    found = function_problems(Config.model_validate({"eval": {"eval_config": str(file)}}))
    assert [line.partition(f" {tmp_path}/mine.py")[0] for line in found] == [
        f"--eval-config {file}: a.{key}" for key in keys
    ]


def test_every_setting_that_names_a_function_is_looked_at():
    (marker,) = FunctionPath.__metadata__
    named = {
        (group, key)
        for key, group in fields().items()
        if _has(groups()[group].model_fields[key], marker)
    }
    assert named == {(group, key) for group, key, _ in SETTINGS}


def _has(field, marker) -> bool:
    parts = getattr(field.annotation, "__args__", (field.annotation,))
    return any(marker in getattr(part, "__metadata__", ()) for part in parts)


def reward(path: str | Path) -> Config:
    return Config.model_validate({"rollout": {"custom_rm_path": str(path)}})


def test_a_reward_post_process_has_slimes_signature(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def good(args, samples, **kwargs): pass\ndef bad(groups, penalties, more): pass\n"
    )

    def found(name):
        grpo = {"custom_reward_post_process_path": f"{tmp_path}/mine.py:{name}"}
        return function_problems(Config.model_validate({"grpo": grpo}))

    assert found("good") == []
    (problem,) = found("bad")
    assert "bad(groups, penalties, more) cannot be called; use (args, samples)" in problem
