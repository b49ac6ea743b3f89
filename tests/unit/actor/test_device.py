"""The seed of the settings is that of every generator which a checkpoint keeps."""

import random

import numpy as np
import pytest
import torch

from rlpost.actor import device


@pytest.mark.parametrize("seed", [1234, -1])
def test_a_seed_is_that_of_python_numpy_and_torch(seed):
    drawn = []
    for _ in range(2):
        device.seed(seed)
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]
