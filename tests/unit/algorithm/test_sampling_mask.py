"""The columns that a sampling mask removes, compared with a loop over rows and ids."""

import random

import pytest
import torch

from rlpost.algorithm.sampling_mask import removed_columns

VOCABULARY = 17


@pytest.mark.parametrize(("first", "width"), [(0, VOCABULARY), (0, 6), (6, 6), (12, 5), (5, 0)])
def test_ids_outside_a_rows_set_are_removed_and_an_empty_set_removes_nothing(first, width):
    dice = random.Random(2)
    sets = [sorted(dice.sample(range(VOCABULARY), dice.randint(0, 5))) for _ in range(40)] + [[]]
    found = removed_columns(
        torch.tensor([len(each) for each in sets]),
        torch.tensor([token for each in sets for token in each]),
        first=first,
        width=width,
    )
    assert found.shape == (len(sets), width)
    for row, kept in enumerate(sets):
        for column in range(width):
            assert found[row, column] == (bool(kept) and first + column not in kept)


def test_a_part_without_rows_has_no_columns_to_remove():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert removed_columns(nothing, nothing, first=0, width=4).shape == (0, 4)
