"""Options of users reach Megatron's dataclasses in the types of their fields."""

import pytest

from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.trainer.megatron_fields import configured

# After rlpost.trainer, which prepares it for a CPU.
from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.enums import AttnBackend  # isort: skip

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def test_options_of_a_dataclass_take_precedence_over_the_trainers_fields():
    options = {
        "attention_backend": "flash",
        "moe_z_loss_coeff": 1,
        "log_num_zeros_in_grad": True,
        "bucket_size": 3,
    }
    model = configured(TransformerConfig, options)(**SIZES, attention_backend=AttnBackend.unfused)
    assert (model.attention_backend, model.moe_z_loss_coeff) == (AttnBackend.flash, 1.0)
    assert configured(OptimizerConfig, options)().log_num_zeros_in_grad is True
    assert configured(DistributedDataParallelConfig, options)(bucket_size=None).bucket_size == 3


def test_a_single_element_of_a_list_is_a_list():
    kind = configured(TransformerConfig, {"recompute_modules": "core_attn"})
    assert kind(**SIZES).recompute_modules == ["core_attn"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attention_backend": "fast"}, ["fast", "flash"]),
        ({"bucket_size": "many"}, ["--bucket-size", "many", "integer"]),
    ],
)
def test_a_value_of_the_wrong_type_is_reported_with_the_expected_one(options, words):
    with pytest.raises(ConfigError) as caught:
        configured(
            TransformerConfig if "attention_backend" in options else DistributedDataParallelConfig,
            options,
        )()
    assert all(word in str(caught.value) for word in words)


def test_megatron_options_of_a_recipe_reach_the_actor():
    config = load([], {"megatron": {"deterministic_mode": True, "bucket_size": 7}}).config
    assert config.megatron.options == {"deterministic_mode": True, "bucket_size": 7}
