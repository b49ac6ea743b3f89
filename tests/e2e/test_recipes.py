"""Scaled-down recipes, trained with two real steps: GLM-4.5 with experts and pipelines; a dense Qwen3 that
generates in FP8, with the judge and the teacher of two other recipes. Both share GPUs with engines; those
in FP8 get weights in slices.

The recipes left out have no setting that no other run has: tests/e2e/test_external.py is one step
off, tests/e2e/test_rollout.py fully asynchronous. All are rehearsed
(tests/contract/cuda/test_every_rank.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.config.load import JOBS, files_of, load
from rlpost.models.config_file import read_config
from rlpost.trainer.weights.importer import HuggingFaceFolder
from tests.e2e.scaled import assert_two_steps_are_trained, make_models, run_scaled

RANKS, LARGE_RANKS = 2, 4
GROUPS = ("judge", "teacher")
RECIPE = "qwen3_4b_fp8_judge_and_teacher.toml"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models and of the runs."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / RECIPE).write_text(fp8_judge_and_teacher())
    make_models(folder, [folder / RECIPE], RANKS)
    return folder


def fp8_judge_and_teacher() -> str:
    """Return the recipe with a teacher, with reward and engines of the recipe with a judge, and with
    the checkpoint of the recipe in FP8.
    """
    judge, teacher, fp8 = (
        (JOBS / f"recipes/qwen3_4b_{name}.toml").read_text() for name in (*GROUPS, "fp8")
    )
    reward = judge[judge.index("custom_rm_path") : judge.index("[engines.judge]")]
    engines = judge[judge.index("[engines.judge]") :]
    checkpoint = fp8[fp8.index("[checkpoint]") :]
    return teacher.replace("[rollout]", f"[rollout]\n{reward}") + engines + checkpoint


def test_recipes_train_and_generate_in_fp8_and_ask_a_judge_and_a_teacher(home: Path) -> None:
    """The trainer does not compute in FP8: log-probs differ by far more than rounding, and by far
    less than those of two models. Both groups of engines are asked about every answer.
    """
    run = run_scaled(home, home / RECIPE, RANKS, "--update-weight-transport", "slices")
    assert run.config.cluster.colocate and run.config.num_engines == 2
    log = (run.folder / "attempts/0/actor-0.log").read_text()
    assert "offloaded weights" in log and "restored weights" in log
    assert_two_steps_are_trained(run, first_differs=0.05, last_differs=0.05)
    samples = run.config.samples_per_rollout
    for line in run.trained:
        assert line["train/rollout_logprob_abs_diff"] > 1e-3
        assert all(line[f"engines/{group}/num_requests"] >= samples for group in GROUPS)
        assert line["rollout/reward_lost"] == 0
        assert line["train/opd_reverse_kl"] != 0


@pytest.mark.parametrize(
    "transport", ["memory", pytest.param("slices", marks=pytest.mark.on_demand)]
)
def test_glm45_trains_a_pipeline_with_filtered_groups_and_replayed_routes(
    transport: str, tmp_path: Path
) -> None:
    """TP 2, PP 2, EP 2, and engines of two ranks. Twice as many prompts are in flight as a step
    trains; the others are trained by the next step, one version later. Four optimizer steps a
    rollout, asynchronous saves, a trained layer for multi-token prediction, and routing replay.
    """
    make_models(tmp_path, ["glm45_355b"], LARGE_RANKS)
    flags = ("--use-rollout-routing-replay", "--enable-mtp-training")
    sent = ("--update-weight-transport", transport)
    run = run_scaled(tmp_path, "glm45_355b", LARGE_RANKS, *flags, *sent)
    config = run.config
    assert_two_steps_are_trained(run, last_differs=1e-2)
    perf = config.perf
    sizes = (
        perf.tensor_model_parallel_size,
        perf.pipeline_model_parallel_size,
        perf.expert_model_parallel_size,
    )
    assert sizes == (2, 2, 2) and config.num_steps_per_rollout == 4
    assert config.cluster.rollout_num_gpus_per_engine == 2
    assert config.checkpoint.async_save and config.grpo.advantage_estimator == "gspo"
    first, last = run.trained
    assert first["rollout/num_held"] + first["rollout/num_unfinished"] > 0, (
        "more prompts are in flight than a step trains"
    )
    assert (first["rollout/staleness_max"], last["rollout/staleness_max"]) == (0, 1)
    names = HuggingFaceFolder(config.checkpoint.hf_checkpoint).file_of
    layers = read_config(config.checkpoint.hf_checkpoint)["num_hidden_layers"]
    assert f"model.layers.{layers}.eh_proj.weight" in names
    for line in run.trained:
        assert line["train/routing_replayed_frac"] > 0.9, "all but the last token of an answer"
        assert line["rollout/routes_unknown_frac"] < 0.1
        assert line["train/mtp_loss"] > 0.0
    assert first["train/routing_diff_frac"] < 0.05, "the trainer has the weights of the engine"


def test_the_recipe_in_bfloat16_differs_from_the_trained_one_in_its_checkpoint_alone() -> None:
    one, other = settings_of("qwen3_4b"), settings_of("qwen3_4b_fp8")
    different = {key for key in one | other if one.get(key) != other.get(key)}
    assert different == {"job_name", "hub_models", "hf_checkpoint"}


def test_the_decoupled_recipe_differs_from_the_async_one_in_its_mode_alone() -> None:
    one, other = settings_of("qwen3_4b_decoupled"), settings_of("qwen3_4b_async")
    different = {key for key in one | other if one.get(key) != other.get(key)}
    assert different == {"job_name", "rollout_mode"}


def settings_of(name: str) -> dict[str, object]:
    """Return all settings of a recipe by their names, without their tables."""
    settings: dict[str, object] = {}
    for table in load(files_of(JOBS / f"recipes/{name}.toml"), {}).config.model_dump().values():
        settings |= table
    return settings
