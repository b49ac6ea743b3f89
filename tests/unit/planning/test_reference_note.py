"""A reference on which nothing depends is reported with its cost, and only that one."""

from __future__ import annotations

import pytest

from common.units import size_text
from rlpost.cli.check import main as check_main
from rlpost.cli.submit import main as submit_main
from rlpost.config.load import JOBS, load, read_toml
from rlpost.config.plan.shape import Shape
from rlpost.extensions.planning.plan_verb import main as plan_main
from rlpost.extensions.planning.rank_memory import host_bytes, reference_note, training_share
from tests.unit.cli.projects import make_project

DENSE = Shape(hidden=8, ffn=16, heads=4, groups=2, head_dim=2, vocab=30, sparse=(False,) * 4)


def config(**groups):
    return load([], groups).config


def test_a_divergence_that_weighs_nothing_is_told_with_its_price():
    measured = config(grpo={"use_kl_loss": True}, cluster={"actor_num_gpus_per_node": 2})
    note = reference_note(measured, DENSE)
    # every rank has the whole model in bfloat16: 2 bytes x 2 copies x 2 ranks
    assert host_bytes(measured, DENSE) == DENSE.parameters.total * 2 * 2 * 2
    assert size_text(host_bytes(measured, DENSE)) in note
    assert (
        "25% of the training time" in note and "train/ref_kl" in note and "--use-kl-loss no" in note
    )
    assert "host memory" not in reference_note(measured, None)


@pytest.mark.parametrize(
    "grpo",
    [
        {},
        {"use_kl_loss": True, "kl_loss_coef": 0.001},
        {"use_kl_loss": True, "kl_coef": 0.1},
        {"use_kl_loss": True, "loss_type": "custom_loss", "custom_loss_function_path": "a.b"},
    ],
)
def test_one_that_weighs_something_or_is_not_there_is_not(grpo):
    assert reference_note(config(grpo=grpo), DENSE) is None


def test_recomputation_and_more_steps_make_its_part_smaller():
    recomputed = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert training_share(config()) == 1 / 4
    assert training_share(config(perf=recomputed)) == 1 / 5
    assert training_share(config(perf=recomputed, rollout={"num_steps_per_rollout": 4})) == 1 / 6


def test_check_and_submit_say_it_and_go_on(tmp_path, monkeypatch, capsys):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert check_main(["recipe.toml", "--use-kl-loss", "yes"]) == 0
    assert "note" in (said := capsys.readouterr().out) and "only measures train/ref_kl" in said
    assert submit_main(["recipe.toml", "--use-kl-loss", "yes", "--dry-run"]) == 0
    assert "note: --use-kl-loss" in capsys.readouterr().err
    assert check_main(["recipe.toml"]) == 0
    assert "train/ref_kl" not in capsys.readouterr().out


def test_plan_says_it(monkeypatch, capsys):
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    recipe = str(JOBS / "recipes/glm45_355b.toml")
    plan_main([recipe, "--use-kl-loss", "yes"])
    said = " ".join(capsys.readouterr().out.split())
    assert "17% of the training time" in said and "GB of host memory a node" in said
    plan_main([recipe])
    assert "train/ref_kl" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["glm45_355b", "qwen3_30b_a3b"])
def test_recipes_with_the_optimizer_in_host_memory_keep_no_idle_reference(name):
    recipe = read_toml(JOBS / f"recipes/{name}.toml")
    assert recipe["optimizer"]["optimizer_cpu_offload"]
    assert not (recipe["grpo"]["use_kl_loss"] and recipe["grpo"]["kl_loss_coef"] == 0)
