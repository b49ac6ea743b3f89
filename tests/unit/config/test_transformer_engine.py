"""What a run needs TransformerEngine for is known from its settings, and refused where it is known
not to be there.
"""

import importlib.metadata
import importlib.util
import json

import pytest

from rlpost.cli import check_installed as check
from rlpost.config.load import JOBS, dump, files_of, load, read_dump
from rlpost.config.megatron_options import option_names
from rlpost.config.transformer_engine import MEGATRON_OPTIONS, needs, needs_transformer_engine
from rlpost.errors import ConfigError


def needed(**groups):
    """The settings that require it, and those that are slower without."""
    return sorted_needs(needs_transformer_engine(load([], groups).config))


def sorted_needs(found):
    required = [need.setting for need in found if need.is_required]
    return required, [need.setting for need in found if not need.is_required]


ROTATION = "--no-rope-fusion false"


def test_a_dense_model_needs_nothing_and_is_slower_without_one_kernel():
    assert needed() == ([], [ROTATION])
    assert needed(perf={"no_rope_fusion": True}) == ([], [])
    assert sorted_needs(needs(load([], {}).config, {"rotary_interleaved": True})) == ([], [])


@pytest.mark.parametrize(
    ("groups", "setting"),
    [
        ({"perf": {"moe_grouped_gemm": True}}, "--moe-grouped-gemm true"),
        ({"perf": {"moe_permute_fusion": True}}, "--moe-permute-fusion true"),
        (
            {"optimizer": {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}},
            "--exp-avg-dtype bf16",
        ),
        ({"megatron": {"fp8": "hybrid"}}, "--fp8 hybrid"),
        ({"megatron": {"attention_backend": "fused"}}, "--attention-backend fused"),
    ],
)
def test_each_setting_that_requires_it_is_named_by_flag_and_value(groups, setting):
    (required,), _ = needed(**groups)
    assert required.startswith(setting)


@pytest.mark.parametrize(
    "groups",
    [
        {"lora": {"lora_rank": 8}},
        {"optimizer": {"use_precision_aware_optimizer": True}},
        {"optimizer": {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}},
        {"megatron": {"fp8": False, "attention_backend": "flash", "moe_router_fusion": False}},
        {"perf": {"moe_grouped_gemm": False}},
    ],
)
def test_what_is_had_without_it_does_not_require_it(groups):
    """Adam in host memory is Megatron's; FlashAttention is torch's."""
    assert needed(**groups)[0] == []


def test_experts_of_which_nothing_is_said_are_slower_without_it():
    config = load([], {"perf": {"moe_permute_fusion": True}}).config
    _, slower = sorted_needs(needs(config, {"num_moe_experts": 8}))
    assert slower == ["--moe-grouped-gemm, not given", ROTATION]
    assert sorted_needs(needs(config, {})) == ([], [ROTATION]), "a dense model has no experts"


def test_the_options_are_fields_of_megatron():
    assert MEGATRON_OPTIONS.keys() <= option_names()


@pytest.mark.parametrize("recipe", ["glm45_355b", "qwen3_30b_a3b", "qwen3_4b"])
def test_an_environment_for_gpus_without_it_is_refused_on_the_login_node(recipe, monkeypatch):
    """Where it is the nodes' own, without a container; one for a CPU alone is not asked."""
    config = load(files_of(JOBS / "recipes" / f"{recipe}.toml"), {}).config
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.13.0" if name == "torch" else real(name)
    )
    if recipe == "qwen3_4b":
        return check.check_installed(config)
    with pytest.raises(ConfigError) as caught:
        check.check_installed(config)
    grouped = str(caught.value)
    assert grouped.startswith("--moe-grouped-gemm true needs TransformerEngine")
    assert (
        "not installed in this environment; install it (docs/actor.md) or give --moe-grouped-gemm f"
        in grouped
    )
    monkeypatch.undo()
    check.check_installed(config)


def test_where_it_is_installed_nothing_is_said_unless_adapters_need_other_layers(monkeypatch):
    """Its Adam is had with these too."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: real("json" if "engine" in name else name)
    )
    adam = {
        "optimizer_cpu_offload": False,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
    }
    recipe = files_of(JOBS / "recipes/glm45_355b.toml")
    check.check_installed(load(recipe, {"optimizer": adam}).config)
    with pytest.raises(ConfigError) as caught:
        check.check_installed(load(recipe, {"optimizer": adam, "lora": {"lora_rank": 8}}).config)
    grouped = str(caught.value)
    assert (
        "--moe-grouped-gemm" in grouped
        and "whose layers have no adapters (--lora-rank); give" in grouped
    )


def test_a_run_of_an_earlier_version_that_chose_its_layers_is_read_and_told_so():
    tables = json.loads(dump(load([], {}).config))
    tables["perf"]["transformer_impl"] = "local"
    config, (line,) = read_dump(json.dumps(tables))
    assert config == load([], {}).config
    assert "--transformer-impl local: layers are TransformerEngine's on GPUs" in line
    tables["perf"]["transformer_impl"] = None
    assert read_dump(json.dumps(tables))[1] == []
