"""Which engines get kernels that keep the layout of the checkpoint."""

import pytest

from rlpost.engines.blackwell import DENSE, EXPERTS, TRITON, updatable_kernels
from rlpost.models.config_file import language_model

FP8 = {"quantization_config": {"quant_method": "fp8"}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
MIXTURE, DENSE_MODEL = {"num_experts": 8}, {"num_experts": None}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DENSE_MODEL, {}),
        (MIXTURE, {EXPERTS: TRITON}),
        (language_model({"text_config": MIXTURE}), {EXPERTS: TRITON}),
        (DENSE_MODEL | FP8, {DENSE: TRITON}),
        (MIXTURE | FP8, {EXPERTS: TRITON, DENSE: TRITON}),
        (MIXTURE | MXFP4, {}),
    ],
)
def test_kernels_by_model(config, expected):
    assert updatable_kernels({}, config, (10, 0)) == expected
    assert updatable_kernels({}, config, (12, 0)) == expected
    assert updatable_kernels({}, config, (9, 0)) == {}


def test_the_user_s_choice_counts():
    given = {EXPERTS: "flashinfer_trtllm_routed", DENSE: "auto"}
    assert updatable_kernels(given, MIXTURE | FP8, (10, 3)) == {DENSE: TRITON}


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_experts_of_gpt_oss_are_chosen_outside_the_kernel_where_routes_are_returned(capability):
    config, returning = MIXTURE | {"model_type": "gpt_oss"}, {"enable_return_routed_experts": True}
    assert updatable_kernels(returning, config, capability) == {EXPERTS: TRITON}
    is_new = capability >= (10, 0)
    assert updatable_kernels({}, config, capability) == ({EXPERTS: TRITON} if is_new else {})
    assert updatable_kernels(returning, MIXTURE, (9, 0)) == {}
