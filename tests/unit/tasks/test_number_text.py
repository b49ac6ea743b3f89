"""A number has one spelling, in positional digits, however a file stores it."""

import math
import re
import struct
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.tasks.number_text import number_text, plain_text
from rlpost.tasks.prompts import PromptFields, PromptSet
from tests.unit.tasks.sets import letters, write_parquet

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE)
def test_a_float_is_its_shortest_digits_without_exponent(value: float) -> None:
    text = number_text(value)
    assert re.fullmatch(r"-?\d+(\.\d*[1-9])?", text) and text != "-0"
    assert float(text) == value
    assert Decimal(text) == Decimal(repr(value))


@given(st.integers(-(10**30), 10**30) | st.integers(-(10**16), 10**16))
def test_whole_numbers_are_the_same_text_in_every_type(value: int) -> None:
    assert number_text(value) == number_text(Decimal(value)) == plain_text(value) == str(value)
    if abs(value) < 1 << 53:
        assert number_text(float(value)) == str(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18.0, "18"),
        (1e16, "10000000000000000"),
        (1e-7, "0.0000001"),
        (-0.0, "0"),
        (Decimal("18.50"), "18.5"),
    ],
)
def test_the_forms_that_str_writes_differently(value, text) -> None:
    assert number_text(value) == text


def test_other_values_are_their_own_text() -> None:
    assert [plain_text(each) for each in (True, "1.0", math.inf, None)] == ["True", "1.0", "inf", "None"]  # fmt: skip
    with pytest.raises(ValueError, match="nan is not a finite number"):
        number_text(math.nan)


@settings(max_examples=30)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4))
def test_floats_of_32_bits_have_their_own_shortest_digits(tmp_path_factory, values) -> None:
    import pyarrow

    short = pyarrow.float32()
    fields = [("input", pyarrow.string()), ("label", short), ("x", pyarrow.list_(short))]
    path = write_parquet(
        tmp_path_factory.getbasetemp() / "floats.parquet",
        [{"input": "q", "label": value, "x": [value]} for value in values],
        schema=pyarrow.schema(fields),
    )
    prompts = PromptSet(
        path, tokenize=letters, fields=PromptFields("input", label_key="label")
    ).all()
    for prompt, value in zip(prompts, values, strict=True):
        assert struct.pack("f", float(prompt.label)) == struct.pack("f", value) or value == 0
        digits = re.sub(r"^-?0*\.?0*|\.|0+$", "", prompt.label)
        shortest = re.sub(r"^-?0*\.?0*|\.|0+$", "", f"{Decimal(repr(float(f'{value:.9g}'))):f}")
        assert len(digits) <= max(len(shortest), 1)
        assert number_text(prompt.metadata["x"][0]) == prompt.label
