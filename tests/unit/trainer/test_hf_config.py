"""Building config.json from the arguments of [model]."""

import pytest

from rlpost.config.plan.architecture import architecture
from rlpost.errors import ConfigError
from rlpost.models.families import FAMILIES, family
from rlpost.trainer.hf_config import hf_config
from tests.unit.config.test_models import PUBLISHED

SCALED_ROPE = "llama3_1_8b"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_rebuilt_from_its_arguments(name):
    """Each key that the published file has and the words can say: none says how long a sequence may
    be, or how a rotary embedding is scaled.
    """
    published = PUBLISHED[name]
    words = architecture(family(published["architectures"][0]), published)
    made = hf_config(words)
    assert architecture(family(made["architectures"][0]), made) == words
    rope = made.pop("rope_parameters")
    if "sliding_attention" in rope:
        assert rope["sliding_attention"]["rope_theta"] == published["rope_local_base_freq"]
        rope = rope["full_attention"]
    theta = published["rope_theta"]
    assert rope["rope_theta"] == theta
    left_out = {"rope_theta", "rope_scaling", "rope_local_base_freq", "max_position_embeddings"}
    assert {key: made[key] for key in published.keys() - left_out} == {
        key: value for key, value in published.items() if key not in left_out
    }


def test_every_family_has_the_name_of_its_configuration():
    names = [family.model_type for family in FAMILIES.values() if not family.carried]
    assert all(names) and len(set(names)) == len(names)


def test_features_that_no_family_has_are_named():
    words = architecture(family("Qwen3ForCausalLM"), PUBLISHED["qwen3_4b"]) | {
        "post_mlp_layernorm": True
    }
    with pytest.raises(ConfigError, match=r"nearest is Qwen3ForCausalLM:\n--post-mlp-layernorm"):
        hf_config(words)
