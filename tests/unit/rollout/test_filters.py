"""User-defined filters with our interface or slime's."""

import statistics
from argparse import Namespace
from types import SimpleNamespace

import pytest

from rlpost.errors import ConfigError
from rlpost.extensions.slime.arguments import Arguments
from rlpost.rollout.filters import buffer_filter, generate_function, group_filter
from rlpost.types import Sample, SampleGroup, ScoredSample

SETTINGS = {"n_samples_per_prompt": 2, "eps_clip": 0.2, "reward_key": None}


def group(*rewards):
    samples = [Sample(0, index, (1,), (2,), (0.0,), "", "stop", 0) for index in range(len(rewards))]
    return SampleGroup(0, tuple(ScoredSample(*pair) for pair in zip(samples, rewards, strict=True)))


def of_the_guide(args, samples, **kwargs):
    """The filter of slime's dynamic sampling guide, without torch."""
    rewards = [sample.reward for sample in samples]
    return statistics.pstdev(rewards) > 0.0


def of_newer_slime(args, samples, **kwargs):
    assert isinstance(args, Namespace) and args.n_samples_per_prompt == 2
    return SimpleNamespace(keep=samples[0].reward > args.eps_clip, reason="none")


def ours(group, threshold=0.5):
    return group.rewards[0] > threshold


def of_nobody(one, two, three):
    pass


def buffer_of_slime(args, buffer, num_samples):
    pass


def named(function):
    return f"{__name__}.{function.__name__}"


@pytest.mark.usefixtures("slime_adapters")
def test_a_filter_may_have_slimes_interface():
    wanted = group_filter(named(of_the_guide), Arguments(SETTINGS))
    assert wanted(group(0.0, 1.0)) is True and wanted(group(1.0, 1.0)) is False


@pytest.mark.usefixtures("slime_adapters")
def test_a_filter_of_slime_gets_the_settings_as_args_and_may_return_an_object():
    wanted = group_filter(named(of_newer_slime), Arguments(SETTINGS))
    assert wanted(group(1.0, 0.0)) is True and wanted(group(0.1, 0.0)) is False


def test_a_filter_of_ours_is_called_with_the_group_alone():
    assert group_filter(named(ours))(group(1.0)) is True


@pytest.mark.parametrize(
    ("load", "function", "words"),
    [
        (group_filter, of_nobody, r"use \(group\), or slime's \(args, samples, \*\*kwargs\)"),
        (
            buffer_filter,
            buffer_of_slime,
            r"use \(waiting, num_groups\), or slime's \(args, rollout_id, buffer",
        ),
        (
            generate_function,
            ours,
            r"use \(builder, prompt, sampling\), or slime's \(args, sample, sampling_params",
        ),
    ],
)
def test_a_function_with_another_interface_is_refused_before_anything_starts(load, function, words):
    """It is not raised with the first group, as an error that seems worth a retry."""
    with pytest.raises(ConfigError, match=words):
        load(named(function))
