"""Odd configurations of all families: the logits of transformers, or a refusal with its reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest

from rlpost.models.families import FAMILIES
from tests.contract.actor_ranks import run_ranks
from tests.contract.config_keys import compare_keys
from tests.contract.families import make_family
from tests.contract.odd_configs import (
    KINDS,
    Compared,
    compare,
    compare_uploads,
    model_type,
)
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

SEEDS, ENOUGH = range(160), 130
REASON = re.compile(
    r": (has no '?\w+|\w+ ?= ?\S+|layer_types has|mlp_layer_types has|YaRN with \w+)"
)
"""The key, and its value if it has one, after the path of config.json."""

REFUSED = {("Gemma3", "rope in both places"): "rope_type='yarn' is not supported"}
"""Forms of uploads that the trainer refuses, with the reason; Megatron has one factor for all layers."""
TEXT_MODELS = {name for name, family in FAMILIES.items() if not family.carried}
NULL_HEADS = {"Llama", "Qwen2", "Qwen3", "DeepseekV3"}
"""Families of which transformers builds a model whose number of key-value heads is null."""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Compared]:
    folder = tmp_path_factory.mktemp("odd")
    make_family(folder, "qwen2.5")  # for the process groups alone
    settings = rank_config(str(folder), distributed_timeout_minutes=2)
    (found,) = run_ranks(compare, 1, settings, seeds=SEEDS, folder=str(folder))
    return list(found)


def test_an_odd_configuration_has_the_logits_of_transformers_or_is_refused_with_its_reason(
    compared,
):
    assert len(compared) >= ENOUGH
    assert [one for one in compared if one.is_wrong] == []
    refusals = [one.refusal for one in compared if one.refusal is not None]
    assert [text for text in refusals if not REASON.search(text)] == []
    assert len(refusals) < len(compared) / 2
    equal = Counter(one.hf["architectures"][0] for one in compared if one.refusal is None)
    assert equal.keys() == {f"{kind}ForCausalLM" for kind in KINDS} == TEXT_MODELS


def test_every_family_reads_the_forms_of_uploads_as_transformers_does_or_says_why_not(tmp_path):
    make_family(tmp_path, "qwen2.5")  # for the process groups alone
    settings = rank_config(str(tmp_path), distributed_timeout_minutes=2)
    (found,) = run_ranks(compare_uploads, 1, settings, folder=str(tmp_path))
    assert {kind for kind, _ in found} == {name.removesuffix("ForCausalLM") for name in TEXT_MODELS}
    refused = {place: one.refusal for place, one in found.items() if one and one.refusal}
    assert refused.keys() == REFUSED.keys()
    assert all(reason in refused[place] for place, reason in REFUSED.items())
    no_model = {place for place, one in found.items() if one is None}
    assert no_model == {(kind, "null key-value heads") for kind in {*KINDS} - NULL_HEADS}
    assert {place: one for place, one in found.items() if one and one.is_wrong} == {}


def test_a_key_of_config_json_changes_the_logits_as_in_transformers_or_is_refused(tmp_path):
    """Keys are those of transformers' classes, so that no list of ours decides what is tried."""
    make_family(tmp_path, "qwen2.5")  # for the process groups alone
    settings = rank_config(str(tmp_path), distributed_timeout_minutes=2)
    (found,) = run_ranks(compare_keys, 1, settings, folder=str(tmp_path), every=False)
    assert {kind for kind, *_ in found} == set(KINDS)
    assert {change: one for change, one in found.items() if one.is_wrong} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_the_values_of_absent_keys_are_the_defaults_of_transformers(kind):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type(kind)).to_dict()
    defaults = dict(FAMILIES[f"{kind}ForCausalLM"].defaults)
    interval = defaults.pop("full_attention_interval", None)  # no attribute of the class
    if interval is not None:
        assert theirs["layer_types"].index("full_attention") == interval - 1
    if kind == "Glm4MoeLite":  # its class has mlp_layer_types instead
        assert theirs["mlp_layer_types"].index("sparse") == defaults.pop("first_k_dense_replace")
    if "rope_parameters" in defaults:
        del theirs["rope_parameters"]["rope_theta"]  # at the top level of config.json
    assert {key: theirs[key] for key in defaults} == defaults
