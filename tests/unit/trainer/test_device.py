"""Seeds of all generators; the flash-attn that TransformerEngine has found."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlpost.trainer import device


@pytest.mark.parametrize("seed", [1234, -1])
def test_a_seed_is_that_of_python_numpy_and_torch(seed):
    drawn = []
    for _ in range(2):
        device.seed(seed)
        drawn.append((random.random(), np.random.random(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(("two", "three"), [(False, False), (True, False), (False, True)])
def test_flash_attention_is_what_the_engine_has_found(monkeypatch, two, three):
    versions = SimpleNamespace(is_installed=two, v3_is_installed=three)
    utils = SimpleNamespace(FlashAttentionUtils=versions)
    for name, module in {"backends": SimpleNamespace(), "utils": utils}.items():
        monkeypatch.setitem(sys.modules, f"{device._ENGINE_ATTENTION}.{name}", module)
    assert device.has_flash_attention() is (two or three)


def test_a_package_that_shares_the_name_of_flash_attention_does_not_count(tmp_path, monkeypatch):
    """flash-attn-4 has the module ``flash_attn.cute`` alone."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not device.has_flash_attention()
