"""NaN and infinity are refused where a sample is made, in every field that the trainer computes with."""

from __future__ import annotations

import dataclasses
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost import types
from rlpost.columns import FloatColumn
from rlpost.errors import NotFinite
from rlpost.types import Sample, ScoredSample, TrainSample

LENGTH = 3
COLUMNS = dict.fromkeys(("rollout_logprobs", "teacher_logprobs"), (-1.0, -2.0, -3.0))
SAMPLE = Sample(
    prompt_id=7, index=0, prompt_ids=(1,), response_ids=(2, 3, 4), text="", finish_reason="stop",
    policy_version=0, reward=0.5, teacher_top_ids=(1, 2, 3), teacher_top_logprobs=(-1.0,) * LENGTH,
    loss_mask=(0, 1, 0), **COLUMNS,
)  # fmt: skip
TRAIN_SAMPLE = TrainSample(
    token_ids=(1, 2, 3, 4), prompt_length=1, loss_mask=(0, 1, 0), advantage=(0.5, 0.5, 0.5),
    teacher_top_ids=(1, 2, 3), teacher_top_logprobs=(-1.0,) * LENGTH, **COLUMNS,
)  # fmt: skip
VALID = (SAMPLE, ScoredSample(SAMPLE, 0.5), TRAIN_SAMPLE)


def numbers_of(value: object) -> list[str]:
    """The fields of a type that hold numbers with a fraction, by their annotations."""
    hints = typing.get_type_hints(type(value), vars(types))
    kinds = {name: {hint, *typing.get_args(hint)} for name, hint in hints.items()}
    return [name for name, kind in kinds.items() if kind & {float, FloatColumn}]


FIELDS = [(value, name) for value in VALID for name in numbers_of(value)]


def test_the_fields_are_those_that_are_known_today() -> None:
    assert [(type(value).__name__, name) for value, name in FIELDS] == [
        ("Sample", "rollout_logprobs"),
        ("Sample", "teacher_logprobs"),
        ("Sample", "teacher_top_logprobs"),
        ("Sample", "reward"),
        ("ScoredSample", "reward"),
        ("TrainSample", "rollout_logprobs"),
        ("TrainSample", "advantage"),
        ("TrainSample", "weight"),
        ("TrainSample", "teacher_logprobs"),
        ("TrainSample", "teacher_top_logprobs"),
    ]


@given(
    field=st.sampled_from(FIELDS),
    broken=st.sampled_from([math.nan, math.inf, -math.inf, 1e39, -1e300]),
    position=st.integers(0, LENGTH - 1),
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_number_that_is_not_finite_in_float32_is_refused_with_its_place(field, broken, position):
    """Also where the loss mask is 0."""
    value, name = field
    before = getattr(value, name)
    if not isinstance(before, FloatColumn):
        with pytest.raises(NotFinite, match=rf"^{type(value).__name__}\.{name} = "):
            dataclasses.replace(value, **{name: broken})
        return
    changed = list(before)
    changed[position] = broken
    with pytest.raises(NotFinite, match=rf"^{type(value).__name__}\.{name}\[{position}\] = "):
        dataclasses.replace(value, **{name: changed})


def test_an_advantage_for_the_whole_response_is_checked_as_well() -> None:
    with pytest.raises(NotFinite, match=r"^TrainSample\.advantage = nan; it must be finite"):
        dataclasses.replace(TRAIN_SAMPLE, advantage=math.nan)
