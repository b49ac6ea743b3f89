"""What needs TransformerEngine in an image follows from the recipe."""

from __future__ import annotations

import pytest

from rlpost.cli.main import main
from rlpost.config.checks.transformer_engine import transformer_engine_reasons
from rlpost.config.load import JOBS, files_of, load

GROUPED, FUSED, OFFLOAD = "--moe-grouped-gemm", "--moe-permute-fusion", "--optimizer-cpu-offload"


def reasons(**groups):
    return transformer_engine_reasons(load([], groups).config)


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ({}, []),
        ({"optimizer": {"optimizer_cpu_offload": True}}, [OFFLOAD]),
        ({"optimizer": {"use_precision_aware_optimizer": True}}, []),
        (
            {"optimizer": {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}},
            ["--exp-avg-dtype bf16"],
        ),
        ({"perf": {"transformer_impl": "transformer_engine"}}, ["--transformer-impl transformer_engine"]),
        ({"model": {"moe_permute_fusion": True}}, []),
        ({"model": {"num_experts": 8}}, [GROUPED]),
        ({"model": {"num_experts": 8, "moe_grouped_gemm": False, "moe_permute_fusion": True}}, [FUSED]),
        ({"model": {"num_experts": 8}, "perf": {"transformer_impl": "local"}}, []),
        (
            {"optimizer": {"optimizer_cpu_offload": True}, "perf": {"transformer_impl": "local"}},
            [OFFLOAD],
        ),
    ],
)
def test_settings_that_need_it(groups, found):
    assert reasons(**groups) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("glm45_355b", [OFFLOAD, GROUPED, FUSED]),
        ("qwen3_30b_a3b", [OFFLOAD, GROUPED, FUSED]),
        ("qwen3_4b", []),
        ("glm_z1_9b", []),
        ("tiny", []),
    ],
)
def test_recipes_that_need_it(name, found):
    assert transformer_engine_reasons(load(files_of(JOBS / f"recipes/{name}.toml", {}), {}).config) == found


def test_the_doctor_of_an_image_looks_for_what_the_recipe_needs(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("RLPOST_IMAGE", "/i.sqsh")
    monkeypatch.setenv("RLPOST_ASSETS", "/a")
    site = ["--cluster", "site", "--dry-run"]
    for name, wanted in (("glm45_355b", f"--te-for={OFFLOAD},{GROUPED},{FUSED}"), ("qwen3_4b", None)):
        assert main(["doctor", "--image", str(JOBS / f"recipes/{name}.toml"), *site]) == 0
        script = capfd.readouterr().out
        assert (f" {wanted}" in script) if wanted else ("--te-for" not in script)
    assert main(["doctor", "--image", *site]) == 0
    assert "--te-for" not in capfd.readouterr().out


def test_the_doctor_inside_the_image_does_too(capfd):
    assert main(["doctor", "--image", str(JOBS / "recipes/glm45_355b.toml")]) == 1
    (row,) = [line for line in capfd.readouterr().out.splitlines() if "TransformerEngine" in line]
    assert row.startswith("LACKS") and OFFLOAD in row
