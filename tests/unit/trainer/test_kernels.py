"""On a CPU, without kernels of TransformerEngine, requested kernels are disabled with one warning."""

import logging
from types import SimpleNamespace

import pytest
import torch

from rlpost.errors import ConfigError
from rlpost.trainer.kernels import kernel_fields
from tests.settings import rank_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
DENSE = SimpleNamespace(fields={}, rope={})
EXPERTS = SimpleNamespace(fields={"num_moe_experts": 8}, rope={})
SCALED = SimpleNamespace(fields={}, rope={"rope_type": "yarn", "factor": 4.0})
ASKED = {"moe_grouped_gemm": True, "moe_permute_fusion": True}


def chosen(description, caplog, **settings):
    with caplog.at_level(logging.WARNING):
        fields = kernel_fields(description, rank_config("", **settings), implementation="local")
    return fields, [record.getMessage() for record in caplog.records]


def test_requested_kernels_of_experts_are_disabled_with_a_warning_each(caplog):
    fields, said = chosen(EXPERTS, caplog, **ASKED)
    assert (fields["moe_grouped_gemm"], fields["moe_permute_fusion"]) == (False, False)
    assert len(said) == 2 and all("there is no CUDA here" in line for line in said)
    assert "--moe-grouped-gemm true" in said[0] and "--moe-permute-fusion true" in said[1]


def test_there_is_no_warning_without_a_request_or_without_experts(caplog):
    assert chosen(EXPERTS, caplog)[1] == []
    fields, said = chosen(DENSE, caplog, **ASKED)
    assert said == [] and "moe_grouped_gemm" not in fields


def test_swiglu_is_not_compiled_on_a_cpu(caplog):
    assert chosen(DENSE, caplog)[0]["bias_activation_fusion"] is False


def test_the_fused_rotation_that_lacks_the_factor_of_yarn_is_never_chosen(caplog, monkeypatch):
    """TransformerEngine's kernel for packed sequences takes angles alone, from position 0."""
    monkeypatch.setattr("rlpost.trainer.kernels._check", lambda *_, **__: None)
    text, images = rank_config(""), rank_config("", multimodal_keys={"image": "images"})
    for description, config, is_fused in (
        (DENSE, text, True),
        (SCALED, text, False),
        (DENSE, images, False),
    ):
        fields = kernel_fields(description, config, implementation="transformer_engine")
        assert fields["apply_rope_fusion"] is is_fused


def test_a_request_for_that_kernel_is_refused(caplog):
    asked = {"megatron": {"apply_rope_fusion": True}}
    with pytest.raises(ConfigError, match=r"lacks the factor 1\.139 of YaRN"):
        chosen(SCALED, caplog, **asked)


@pytest.mark.parametrize(
    ("shared", "settings", "overlaps"),
    [
        (32, {}, True),
        (None, {}, False),
        (32, {"moe_token_dispatcher_type": "flex"}, False),
        (32, {"megatron": {"moe_shared_expert_overlap": False}}, False),
        (32, {"megatron": {"overlap_moe_expert_parallel_comm": True}}, False),
        (32, {"megatron": {"recompute_modules": ["shared_experts"]}}, False),
    ],
)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_shared_experts_overlap_where_megatron_permits_it(
    shared, settings, overlaps, implementation, monkeypatch
):
    """On CUDA with TransformerEngine, whose layers have no adapters."""
    monkeypatch.setattr("rlpost.trainer.kernels._check", lambda *_, **__: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    fields = EXPERTS.fields | {"moe_shared_expert_intermediate_size": shared}
    made = kernel_fields(
        SimpleNamespace(fields=fields, rope={}),
        rank_config("", **settings),
        implementation=implementation,
    )
    assert made["moe_shared_expert_overlap"] is (overlaps and implementation != "local")
