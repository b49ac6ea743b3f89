"""Memory of engines without GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.errors import ConfigError
from rlpost.extensions.on_cpu.engine_memory import LEAST, MOST, cache_bytes, memory_fraction

HF = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "dtype": "bfloat16",
}
TOKENS = {"max_total_tokens": 1000}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 2 MB, which take 4 MB in float32."""
    (tmp_path / "config.json").write_text(json.dumps(HF))
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    return tmp_path


def test_the_cache_has_keys_and_values_of_all_layers_in_float32():
    assert cache_bytes(HF) == 2 * 4 * 2 * 64 * 4
    assert cache_bytes(HF | {"head_dim": 32, "num_key_value_heads": None}) == 2 * 4 * 8 * 32 * 4


@pytest.mark.parametrize("free", [30_000_000, 100_000_000, 10**12])
@pytest.mark.parametrize("is_linear", [False, True])
def test_what_sglang_leaves_for_the_cache_is_enough_beside_a_trainer(folder, free, is_linear):
    """``_profile_available_bytes``: free memory after loading, less (1 - fraction) of that before."""
    if is_linear:
        linear = HF | {"linear_num_value_heads": 8}
        (folder / "config.json").write_text(json.dumps(linear))
    fraction = memory_fraction(folder, TOKENS, free)
    left = (free - 5 * 4_000_000) - free * (1 - fraction)
    assert left >= 1000 * cache_bytes(HF)
    assert LEAST <= fraction <= MOST
    if is_linear:  # its states take about half of what is left
        assert left <= LEAST * free + 1000 * cache_bytes(HF) + 1
    else:
        taken = 0.9 * free  # by other processes while the engine starts
        assert free - taken - free * (1 - fraction) > 0


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs(folder):
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB .*--sglang-max-total-tokens"):
        memory_fraction(folder, TOKENS, 8_000_000)
    assert memory_fraction(folder, TOKENS, 9_000_000) == MOST
