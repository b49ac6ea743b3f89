"""Megatron's configurations of all recipes and families, with and without TransformerEngine."""

from __future__ import annotations

import pytest

from rlpost.config.groups.perf import FP8_ROWS
from rlpost.models.families import FAMILIES as REGISTRY
from tests.contract import families
from tests.contract.cuda.conftest import FAMILIES, IMPLEMENTATIONS
from tests.contract.cuda.observations_table import GPUS, OF_EXPERTS, ON_GPUS, ON_HOST, RECIPES
from tests.contract.families import LATENT_MTP

pytestmark = pytest.mark.timeout(300)
# Interleaved rotary embedding (two), latent attention (three), and YaRN (two).
WITHOUT_ROTARY_KERNEL = (
    "glm_z1_9b", "glm4-0414", "deepseek-v3-moe", LATENT_MTP, "glm4.7-flash-moe", "qwen3-long", "gpt-oss-moe",
    "qwen3_vl_4b_geo3k",  # positions of images
)  # fmt: skip
WITHOUT_FUSED_ACTIVATION = {
    "local": ("gemma3", "gpt-oss-moe"),
    "transformer_engine": ("gemma3",),
}
"""A GELU without a fused kernel, and one that clamps before the bias of an expert is added."""
WITH_WINDOWS = ("gemma3", "qwen3-long")


def fields(found, table, *names):
    assert "error" not in found, found["error"]
    return tuple(found[table][name] for name in names)


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_transformer_engine_a_recipe_gets_every_kernel_that_it_requests(observe, recipe):
    found = observe("transformer_engine")["recipes"][recipe]
    experts, rotated = recipe in OF_EXPERTS, recipe not in WITHOUT_ROTARY_KERNEL
    assert found["implementation"] == "transformer_engine"
    assert fields(found, "model", "bias_activation_fusion", "apply_rope_fusion") == (True, rotated)
    assert fields(found, "model", "moe_grouped_gemm", "moe_permute_fusion") == (experts, experts)
    assert ("TEGroupedMLP" in found["modules"]) == experts


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_transformer_engine_a_recipe_is_refused_by_flag_or_uses_megatrons_own_kernels(
    observe, recipe
):
    found = observe("local")["recipes"][recipe]
    if recipe in OF_EXPERTS:
        grouped = found["error"]
        assert grouped.startswith("ConfigError: --moe-grouped-gemm true needs Transformer")
        assert "not installed on this node; install it (docs/actor.md) or" in grouped
        return
    assert found["implementation"] == "local"
    assert fields(found, "model", "bias_activation_fusion", "apply_rope_fusion") == (True, False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ON_HOST)
def test_adam_in_host_memory_needs_no_transformer_engine(observe, implementation, recipe):
    """With the kernels disabled, the optimizer is Megatron's HybridDeviceOptimizer.

    It needs the gradient layout of the precision-aware distributed optimizer.
    """
    found = observe(implementation)["recipes without kernels"][recipe]
    assert "SequentialMLP" in found["modules"] and found["implementation"] == implementation
    assert fields(found, "optimizer", "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d") == (
        True,
        True,
    )
    laid_out = (
        "use_precision_aware_optimizer",
        "use_distributed_optimizer",
        "store_param_remainders",
    )
    assert fields(found, "optimizer", *laid_out) == (True, True, False)
    assert set(found["adam"]) == {"HybridDeviceOptimizer"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ["qwen3_4b", "glm_z1_9b", "tiny"])
def test_a_recipe_trains_in_bfloat16_and_sums_in_float32(observe, implementation, recipe):
    found = observe(implementation)["recipes"][recipe]
    assert fields(found, "model", "bf16", "params_dtype", "pipeline_dtype") == (
        True,
        *["torch.bfloat16"] * 2,
    )
    assert fields(found, "optimizer", "bf16", "params_dtype") == (True, "torch.bfloat16")
    assert fields(found, "ddp", "grad_reduce_in_fp32", "use_distributed_optimizer") == (True, True)
    assert set(found["adam"]) == {
        "FusedAdam" if implementation == "transformer_engine" else "AdamW"
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built_at_every_layout(observe, implementation, family):
    for name, found in observe(implementation)["families"][family].items():
        if name == "converter":
            assert "error" not in found
            continue
        kind = name.partition(",")[0]
        rotated = kind == "transformer_engine" and family not in WITHOUT_ROTARY_KERNEL
        assert fields(found, "model", "bias_activation_fusion", "apply_rope_fusion") == (
            family not in WITHOUT_FUSED_ACTIVATION[kind],
            rotated,
        ), name
        assert found["implementation"] == kind


def test_every_family_of_the_registry_is_built():
    built = {f"{families.FAMILIES[name][0]}ForCausalLM" for name in families.FAMILIES}
    assert built == {name for name, family in REGISTRY.items() if not family.carried}


WITHOUT_ENGINES_ATTENTION = ("gpt-oss-moe", "deepseek-v3-moe", LATENT_MTP, "glm4.7-flash-moe")
"""Sinks, and tiny values of 12 numbers, which 8 does not divide."""


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_that_of_the_engine_where_it_has_a_backend(observe, family):
    """The stub of its attention raises if a module that was built has none.

    Megatron would exchange p2p, which has no windows.
    """
    for name, found in observe("transformer_engine")["families"][family].items():
        kind, _, layout = name.partition(", ")
        if kind == "converter":
            continue
        ours = kind == "local" or family in WITHOUT_ENGINES_ATTENTION
        exchange = {"cp": " a2a" if family in WITH_WINDOWS else " p2p"}.get(layout, "")
        expected = "PackedAttention" if ours else f"TEDotProductAttention{exchange}"
        assert found["attention"] == [expected], name


@pytest.mark.parametrize("family", ON_GPUS)
@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_for_which_the_engine_has_no_packed_attention_uses_that_of_this_package(
    observe, family, gpu
):
    """cuDNN has it on Hopper and B200, flash-attn on each GPU; neither has sinks."""
    has_backend = gpu in ("B200", "A100 with flash-attn") and family != "gpt-oss-moe"
    expected = "TEDotProductAttention" if has_backend else "PackedAttention"
    assert observe("transformer_engine")["gpus"][f"{family}, {gpu}"] == [expected]


# settings of ``observations`` -> (error without TransformerEngine, error with it); None: no error
REFUSED = {
    "adam in narrow types": ("--exp-avg-dtype fp8 needs TransformerEngine", None),
    "adam in narrow types, local layers": ("--exp-avg-dtype fp8 needs TransformerEngine", None),
    "experts, every kernel, local layers": (
        "true needs TransformerEngine (its kernel sorts tokens by expert), which is not installed on this node",
        "true needs TransformerEngine (its kernel sorts tokens by expert), whose layers have no adapters (--lora-rank)",
    ),
    "adam on the host": (None, None),
    "adam on the host, types of its own": (
        "excludes --optimizer-cpu-offload, whose state is float32",
    )
    * 2,
    "experts, no word of kernels": (None, None),
    "experts, every kernel": ("--moe-permute-fusion true needs TransformerEngine", None),
    "no rope fusion": (None, None),
    "fused rope of halves where neighbours rotate": ("so its logits would be wrong",) * 2,
    "fused gradients": ("needs a kernel of Apex (fused_weight_gradient_mlp_cuda)",) * 2,
    **{f"fp8, {recipe}": ("--fp8 hybrid needs TransformerEngine", None) for recipe in FP8_ROWS},
    "fused activation that is clamped": ("the kernel clamps the activations of this model before",)
    * 2,
    "unfused swiglu": (None, None),
    "what Megatron refuses": (
        "TransformerConfig refuses these settings: DeepEP backend is only supported",
    )
    * 2,
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_requested_setting_takes_effect_or_is_refused_by_the_name_of_its_flag(
    observe, implementation, name
):
    expected = REFUSED[name][IMPLEMENTATIONS[implementation]]
    found = observe(implementation)["settings"][name]
    if expected is None:
        assert "error" not in found, found["error"]
    else:
        assert found["error"].startswith("ConfigError: ") and expected in found["error"]


def test_single_settings_reach_megatron(observe):
    found = observe("transformer_engine")["settings"]
    types = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    narrow = ("torch.float16", "torch.bfloat16", "torch.uint8", "torch.float16")
    assert fields(found["adam in narrow types"], "optimizer", *types) == narrow
    assert fields(found["no rope fusion"], "model", "apply_rope_fusion") == (False,)
    assert fields(found["unfused swiglu"], "model", "bias_activation_fusion") == (False,)
    for recipe in FP8_ROWS:
        assert fields(found[f"fp8, {recipe}"], "model", "fp8", "fp8_recipe") == ("hybrid", recipe)
    unspoken = found["experts, no word of kernels"]
    assert fields(unspoken, "model", "moe_grouped_gemm", "moe_permute_fusion") == (True, True)


def test_what_is_slower_without_transformer_engine_is_logged_once_with_its_cost(observe):
    """Only the first rank warns, if the library is missing and no setting requests a kernel."""
    said = observe("local")["settings"]["experts, no word of kernels"]["warnings"]
    assert [
        line for line in said if "--moe-grouped-gemm" in line and "several times slower" in line
    ] == said[:1]
    assert [line for line in said if "waits for the GPU" in line] == said[1:]
    assert (
        observe("transformer_engine")["settings"]["experts, no word of kernels"]["warnings"] == []
    )
