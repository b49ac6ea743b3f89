"""Checkpoints are independent of TransformerEngine: written without it, they load with it.

The reverse holds too, and both implementations read the older format.
"""

from __future__ import annotations

import pytest

from tests.contract.cuda.conftest import FAMILIES, run
from tests.contract.families import MTP, make_family_config

pytestmark = pytest.mark.timeout(300)
CONVERTED = ("qwen3", "qwen3-moe", "glm4-0414", "glm4.5-moe", MTP)
"""Families that together have every kind of layer.

These are homogeneous layers, layers with experts among dense layers, norms after linear
layers, shared experts, and a layer for multi-token prediction.
"""
WAYS = (
    "local to transformer_engine", "transformer_engine to local", "older to transformer_engine", "older to local",
    "local to local",
)  # fmt: skip


def pairs(observe, family):
    """Observations of both implementations for each layout of a family."""
    found = observe("transformer_engine")["families"][family]
    layouts = [name.removeprefix("local, ") for name in found if name.startswith("local, ")]
    assert len(layouts) >= 2
    return [(found[f"local, {name}"], found[f"transformer_engine, {name}"]) for name in layouts]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_implementations_have_the_same_keys_with_the_same_global_shapes(observe, family):
    """The keys of tensors and objects, of dense and expert layers, at every layout."""
    for ours, theirs in pairs(observe, family):
        assert ours["keys"] == theirs["keys"]
        assert any(key.startswith("object ") for key in ours["keys"])


@pytest.mark.parametrize("family", FAMILIES)
def test_both_implementations_export_tensors_of_the_same_names_and_shapes(observe, family):
    """This includes sharded experts, whose shards TransformerEngine marks as sharded by row."""
    for ours, theirs in pairs(observe, family):
        assert ours["exported"]["shapes"] == theirs["exported"]["shapes"]


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory):
    root = tmp_path_factory.mktemp("round_trips")
    for name in CONVERTED:
        make_family_config(root / "families" / name, name)
    (root / "checkpoints").mkdir()
    words = str(root / "families"), str(root / "checkpoints")
    return run("tests.contract.cuda.round_trips", *words, with_engine=True)


@pytest.mark.parametrize("family", CONVERTED)
def test_weights_are_restored_bit_for_bit_whichever_implementation_wrote_them(round_trips, family):
    assert round_trips[family] == dict.fromkeys(WAYS)
