"""On a CPU, where no kernel of TransformerEngine exists, what was asked for is named once and left
out.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

from rlpost.actor.kernels import kernel_fields
from rlpost.actor.settings import ActorSettings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without CUDA")
DENSE, EXPERTS = SimpleNamespace(fields={}), SimpleNamespace(fields={"num_moe_experts": 8})
ASKED = {"moe_grouped_gemm": True, "moe_permute_fusion": True}


def chosen(description, caplog, **settings):
    with caplog.at_level(logging.WARNING):
        fields = kernel_fields(description, ActorSettings("", **settings), implementation="local")
    return fields, [record.getMessage() for record in caplog.records]


def test_kernels_of_experts_that_were_asked_for_are_left_out_with_a_warning_each(caplog):
    fields, said = chosen(EXPERTS, caplog, model_args=ASKED)
    assert (fields["moe_grouped_gemm"], fields["moe_permute_fusion"]) == (False, False)
    assert len(said) == 2 and all("there is no CUDA here" in line for line in said)
    assert "--moe-grouped-gemm true" in said[0] and "--moe-permute-fusion true" in said[1]


def test_nothing_is_said_where_nothing_was_asked_for_or_there_are_no_experts(caplog):
    assert chosen(EXPERTS, caplog)[1] == []
    fields, said = chosen(DENSE, caplog, model_args=ASKED)
    assert said == [] and "moe_grouped_gemm" not in fields


def test_swiglu_is_not_compiled_on_a_cpu(caplog):
    assert chosen(DENSE, caplog)[0]["bias_activation_fusion"] is False
