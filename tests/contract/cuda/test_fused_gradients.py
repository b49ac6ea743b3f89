"""Products of TransformerEngine add gradients to Megatron's buffers, by the sources of both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlpost.trainer.kernels import FUSED_GRADIENT, accumulate_in_products
from tests.contract.cuda.engine_source import engine_source
from tests.contract.cuda.library_source import Source
from tests.settings import rank_config

MODULES = "transformer_engine/pytorch/module/"
LAYERS = [
    ("linear.py", "Linear", "_Linear"),
    ("layernorm_linear.py", "LayerNormLinear", "_LayerNormLinear"),
    ("grouped_linear.py", "GroupedLinear", "_GroupedLinear"),
]
DDP = "megatron/core/distributed/distributed_data_parallel.py"


@pytest.mark.parametrize(("file", "layer", "function"), LAYERS)
def test_a_layer_reads_the_attribute_in_each_pass_and_skips_frozen_weights(file, layer, function):
    source = engine_source()
    assert f"self.{FUSED_GRADIENT}" in source.lines(MODULES + file, f"{layer}.forward")
    forward = source.lines(MODULES + file, f"{function}.forward")
    frozen = "weight.requires_grad", "ctx.weights_requires_grad"
    assert any(f"if {FUSED_GRADIENT} and {word}" in forward for word in frozen)
    backward = source.lines(MODULES + file, f"{function}.backward")
    assert "grad_added_to_main_grad = True" in backward and "get_dummy_wgrad(" in backward


@pytest.mark.parametrize(("is_shared", "expected"), [(False, 2.0), (True, 5.0)])
def test_megatron_adds_no_gradient_twice(is_shared, expected):
    """The dummy gradient of a product is dropped, that of a weight tied to another is added."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.main_grad, weight.grad_added_to_main_grad = torch.full((1,), 2.0), True
    weight.zero_out_wgrad, weight.grad = is_shared, torch.full((1,), 3.0)
    make_hook = Source().run(
        DDP,
        "DistributedDataParallel._make_backward_post_hook",
        is_graph_capturing=lambda: False,
    )
    settings = SimpleNamespace(overlap_grad_reduce=False)
    wrapper = SimpleNamespace(ddp_config=settings, param_to_bucket_group={weight: None})
    make_hook(wrapper, weight)()
    assert weight.main_grad.item() == expected and weight.grad is None


def test_the_first_micro_batch_overwrites_only_what_was_cleared():
    """A product overwrites in the first micro-batch after ``set_is_first_microbatch``.

    Gradients are cleared before each call of Megatron's schedule, once (``optimizer.py``).
    """
    backward = engine_source().lines(MODULES + "linear.py", "_Linear.backward")
    assert "ctx.fuse_wgrad_accumulation and (not ctx.is_first_microbatch)" in backward
    schedules = Source().lines("megatron/core/pipeline_parallel/schedules.py", "forward_step")
    assert "if is_first_microbatch and hasattr(model, 'set_is_first_microbatch')" in schedules


@pytest.mark.parametrize(("option", "is_fused"), [({}, True), (False, False)])
def test_all_products_of_a_chunk_accumulate_unless_it_is_turned_off(option, is_fused):
    options = {"megatron": {"gradient_accumulation_fusion": option}} if option is False else {}
    product, plain = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    product.fuse_wgrad_accumulation = False
    accumulate_in_products(torch.nn.Sequential(product, plain), rank_config("", **options))
    assert product.fuse_wgrad_accumulation is is_fused
    assert not hasattr(plain, FUSED_GRADIENT)
