"""The recipes of jobs/: each loads, passes all checks, has its batch script, and agrees with the
published command lines.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.check_settings import check
from rlpost.cli.job import job_spec
from rlpost.config.flags import fields
from rlpost.config.load import JOBS, files_of, load
from rlpost.config.model_arguments import NAMES, ONLY_ZERO, WITHOUT_EFFECT, problems
from rlpost.config.plan.architecture import architecture
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.fetching import tiny_squares
from rlpost.extensions.fetching.arithmetic_data import as_messages
from rlpost.extensions.planning import plan_verb as plan
from rlpost.extensions.planning.estimate import estimate
from rlpost.extensions.planning.plan_engines import planned_groups
from rlpost.extensions.rehearsal.nodes import nodes_check
from rlpost.models.families import family
from slurm.batch.options import Options, needed_variables
from slurm.container import Container
from slurm.errors import SpecError
from slurm.render import render_sbatch
from tests.image_model import make_image_folder
from tests.unit.cli.projects import MODEL, NO_TENSORS, make_project
from tests.unit.config.test_models import PUBLISHED
from tests.unit.config.test_seeds import resolved, without, words_of
from tests.unit.jobs.assets import make_assets
from tools.pages.recipes import recipes_page

RECIPES = sorted(path.stem for path in (JOBS / "recipes").glob("*.toml"))
LARGE = [name for name in RECIPES if name != "tiny"]

NODES = {"tiny": 1, "glm45_355b": 8, "glm46_355b": 8, "glm47_355b": 8, "qwen3_235b_a22b": 16}
NODES |= {"qwen3_4b_teacher": 2, "glm45_355b_fp8": 8}
LAYOUTS = {  # GPUs that train, that generate, engines, data-parallel size
    "qwen3_4b": (8, 8, 4, 4),
    "qwen3_4b_fp8": (8, 8, 4, 4),
    "qwen3_4b_decoupled": (2, 6, 3, 1),
    "qwen3_4b_async": (2, 6, 3, 1),
    "glm_z1_9b": (4, 4, 2, 1),
    "glm45_355b": (64, 64, 2, 2),
    "glm45_355b_fp8": (64, 64, 4, 2),
    "glm46_355b": (64, 64, 2, 2),
    "glm47_355b": (64, 64, 2, 2),
    "qwen3_30b_a3b": (8, 8, 1, 2),
    "qwen3_235b_a22b": (128, 128, 8, 8),
    "smollm2_135m": (1, 1, 1, 1),
    "qwen3_vl_4b_geo3k": (8, 8, 8, 4),
    "qwen3_4b_judge": (4, 4, 2, 2),
    "qwen3_4b_teacher": (8, 8, 4, 4),
}
GROUPS = {  # engines beside the policy's, and the GPUs of each
    "qwen3_4b_judge": {"judge": (2, 2)},
    "qwen3_4b_teacher": {"teacher": (1, 8)},
}

# The published command lines that a recipe combines; later ones take precedence.
SOURCES = {
    "qwen3_4b": ["model-qwen3-4b", "qwen3-4b"],
    "qwen3_4b_decoupled": ["model-qwen3-4b", "qwen3-4b", "qwen3-4b-decoupled"],
    "qwen3_4b_async": ["model-qwen3-4b", "qwen3-4b", "qwen3-4b-decoupled"],
    "qwen3_4b_fp8": ["model-qwen3-4b", "qwen3-4b", "qwen3-4b-fp8"],
    "glm_z1_9b": ["model-glm4-9b", "glm-z1-9b"],
    "glm45_355b": ["model-glm45-355b", "glm45-355b", "partial-rollout", "checkpoint", "wandb"],
}
A_RUN_S_OWN = "into the run's own folder: two runs must not share one"
DIFFERENT = {  # key: why a recipe differs from its source
    "save": A_RUN_S_OWN,
    "load": A_RUN_S_OWN,
    "colocate": "not in the decoupled variants, which are made from the colocated one",
    "dynamic_sampling_filter_path": "the same function here",
    "buffer_filter_path": "the same function here",
    "sglang_mem_fraction_static": "the sources say 0.8 in general and 0.7 where memory runs out",
    "no_save_optim": "a resume is exact: Adam's state is saved, through a bounded buffer",
    "moe_permute_fusion": "the default where TransformerEngine is installed",
    "no_rope_fusion": "a rotary embedding of neighbours is never fused",
    "use_wandb": "needs a key: --use-wandb",
    **dict.fromkeys(
        ("recompute_granularity", "recompute_method", "recompute_num_layers"),
        "all activations fit in memory, and recomputation takes a fourth of the training time",
    ),
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "max_tokens_per_gpu",
        ),
        "the experts of a stage share a node, and all activations fit (docs/speed.md)",
    ),
    "use_kl_loss": "with coefficient 0 it only measures train/ref_kl, in a reference pass",
    "rotary_base": "a million in the published config.json; the source's number is an example of how to override it",
    "moe_token_drop_policy": "which tokens to drop; none are dropped",
}


def read(name: str, assets: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Config:
    """A recipe at a site that keeps its models in ``assets``."""
    monkeypatch.setenv("RLPOST_ASSETS", str(assets))
    return load(files_of(JOBS / "recipes" / f"{name}.toml"), flags).config


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_passes_all_checks(name, assets, monkeypatch):
    """Arithmetic, the model and its published config.json, prompts, rewards, options of SGLang and
    Megatron.
    """
    config = read(name, assets, monkeypatch)
    check(config)
    assert config.num_nodes == NODES.get(name, 1)
    assert LAYOUTS[name] == (
        config.actor_world_size,
        config.rollout_num_gpus,
        config.num_engines,
        config.data_parallel_size,
    )


@pytest.mark.parametrize("name", GROUPS)
def test_a_recipe_with_groups_of_engines_has_their_gpus(name, assets, monkeypatch):
    config = read(name, assets, monkeypatch)
    groups = config.engines.started.items()
    sizes = {key: (group.engines, group.gpus_per_engine(8)) for key, group in groups}
    assert sizes == GROUPS[name]
    assert config.num_group_gpus + config.actor_world_size <= 8 * config.num_nodes
    result = nodes_check(config)
    assert not result.faults, "where the driver places them"
    planned = planned_groups(config, plan.model_of(config)[0], plan.parse_size("H100"))
    assert all(group.problem is None and group.engine is not None for group in planned)


def test_every_recipe_has_its_layout_here():
    assert LAYOUTS.keys() == set(LARGE)


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_without_its_assets_names_the_missing_variable(name, monkeypatch):
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    config = load(files_of(JOBS / "recipes" / f"{name}.toml"), {}).config
    with pytest.raises(ConfigError) as caught:
        check(config)
    (line,) = str(caught.value).splitlines()
    assert (
        line.startswith("$RLPOST_ASSETS is not set")
        and "--assets-dir" in line
        and "--prompt-data" in line
    )


def test_assets_dir_replaces_the_variable(assets, monkeypatch):
    monkeypatch.setenv("RLPOST_ASSETS", "/elsewhere")
    config = load(
        files_of(JOBS / "recipes/qwen3_4b.toml", "site"),
        {"cluster": {"assets_dir": str(assets)}},
    ).config
    assert config.checkpoint.hf_checkpoint == str(assets / "Qwen3-4B")
    assert config.eval_sets == (("aime-2024", str(assets / "aime-2024/aime-2024.jsonl")),)
    assert config.cluster.container_mounts == (str(assets),)


def script(name: str) -> str:
    return (JOBS / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", LARGE)
def test_the_batch_script_of_a_recipe_fits_a_page_and_passes_bash(name):
    text = script(name)
    assert len(text.splitlines()) <= 80
    assert (
        f"#SBATCH --nodes={NODES.get(name, 1)} " in text
        and f"jobs/recipes/{name}.toml --cluster site" in text
    )
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "RLPOST_IMAGE RLPOST_ASSETS"),
        ({"RLPOST_IMAGE": "/i.sqsh"}, "RLPOST_ASSETS"),
        ({"RLPOST_ASSETS": "/a"}, "RLPOST_IMAGE"),
    ],
)
def test_a_job_names_its_sites_missing_variables_and_is_not_requeued(given, missing, tmp_path):
    for name in ("slurm", "common"):
        (tmp_path / name).symlink_to(JOBS.parent / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/enroot").touch(0o755)
    environ = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-8]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(JOBS / "glm45_355b.sbatch")],
        env=environ | given,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 78
    assert f"not set: {missing};" in done.stdout


def test_a_complete_profile_leaves_no_variable(assets, monkeypatch, tmp_path):
    """With jobs/clusters/site.toml filled in, the script contains the values."""
    site = tmp_path / "site.toml"
    site.write_text(
        f"[cluster]\naccount = 'rl'\nassets_dir = '{assets}'\ncontainer = 'pyxis'\ncontainer_image = '/i/x.sqsh'\n"
        "container_mounts = ['$RLPOST_ASSETS']\n"
    )
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    config = load(files_of(JOBS / "recipes/glm45_355b.toml", str(site)), {}).config
    check(config)
    text = render_sbatch(job_spec(config))
    assert "RLPOST_ASSETS" not in text and "not set" not in text
    assert "--account=rl" in text and f"--mount={assets} " in text and "--image=/i/x.sqsh" in text


@pytest.mark.parametrize("name", LARGE)
def test_the_plan_is_the_same_with_the_model_s_config_and_without_it(name, assets, monkeypatch):
    """jobs/models and the published config.json describe one shape; FP8 is known by either."""
    there = plan.model_of(read(name, assets, monkeypatch))
    assert there == plan.model_of(read(name, Path("/nowhere"), monkeypatch))


def test_a_plan_is_made_from_the_command_line(assets, monkeypatch, capsys):
    monkeypatch.setenv("RLPOST_ASSETS", str(assets))
    recipe = str(JOBS / "recipes/qwen3_4b.toml")
    assert plan.main([recipe, "--gpus", "16", "--gpu-memory", "141GB"]) == 0
    assert "16 GPUs: TP 2 x PP 1 x CP 1 x DP 8" in capsys.readouterr().out
    assert (
        plan.main(
            [
                recipe,
                "--gpu-memory",
                "20GB",
                "--tensor-model-parallel-size",
                "1",
                "--sequence-parallel",
                "no",
            ]
        )
        == 2
    )
    assert "does not fit: train" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--gpus 12 is no multiple of .*; use 8 or 16"):
        plan.main([recipe, "--gpus", "12"])


def test_a_config_without_a_size_is_named(assets, monkeypatch, tmp_path):
    config = read("qwen3_4b", assets, monkeypatch)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 2}'
    )
    broken = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"hf_checkpoint": str(tmp_path)})}
    )
    with pytest.raises(
        ConfigError, match=r"config\.json has no 'hidden_size', which every Qwen3ForCausalLM has"
    ):
        plan.model_of(broken)


def test_the_page_of_recipes_is_current(monkeypatch):
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    assert (JOBS.parent / "docs/recipes.md").read_text() == recipes_page(), (
        "docs/recipes.md is old; run make docs"
    )


def setting_of(config: Config, key: str) -> Any:
    group = fields().get(key, "sglang" if key.startswith("sglang_") else "megatron")
    return getattr(getattr(config, group), key, None)


def compared(name: str, config: Config) -> list[tuple[str, Any, Any, str]]:
    """(key, value of the sources, value of the recipe, why they differ) for each key of the sources."""
    published: dict[str, Any] = {}
    for source in SOURCES[name]:
        published |= resolved(without(words_of(source), {"--wandb-key"}))[0]
    hf = PUBLISHED[str(config.checkpoint.model)]
    says = architecture(family(hf["architectures"][0]), hf)
    rows = []
    for key, value in sorted(published.items()):
        if key in WITHOUT_EFFECT:
            continue
        if key in NAMES:
            ours = 0.0 if key in ONLY_ZERO else says[key]
            is_equal = problems({key: value}, says) == []
        else:
            ours = setting_of(config, key)
            is_equal = ours == value
        rows.append((key, value, ours, "" if is_equal else DIFFERENT.get(key, "?")))
    return rows


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_the_published_values_or_a_reason(name, monkeypatch):
    """For every flag of the published command lines."""
    config = read(name, Path("/root"), monkeypatch)
    rows = compared(name, config)
    assert len(rows) > 20
    assert [row for row in rows if row[3] == "?"] == []


def test_the_table_of_recipes_against_what_was_published(
    golden: Callable[[str, str], None], monkeypatch
):
    lines = ["| recipe | setting | published | here | why |", "|---|---|---|---|---|"]
    for name in SOURCES:
        for key, published, ours, why in compared(name, read(name, Path("/root"), monkeypatch)):
            lines.append(f"| {name} | {key} | {published} | {ours} | {why} |")
    golden("recipes.md", "\n".join(lines) + "\n")


def test_qwen3_235b_has_the_workload_that_nemo_rl_published(monkeypatch):
    """NeMo-RL v0.6: 128 H100, generation TP 16, 16 prompts x 32 answers of 8192."""
    config = read("qwen3_235b_a22b", Path("/root"), monkeypatch)
    rollout = config.rollout
    assert config.cluster.rollout_num_gpus_per_engine == 16 and config.samples_per_rollout == 512
    assert rollout.rollout_max_prompt_len + rollout.rollout_max_response_len == 8192
    made = estimate(
        config, plan.model_of(config)[0], gpu_bytes=plan.parse_size("80GB"), engine_width=2
    )
    assert not made.problems and not config.optimizer.optimizer_cpu_offload


@pytest.mark.parametrize("name", ["glm46_355b", "glm47_355b"])
def test_later_glm_recipes_differ_from_glm45_in_the_model_alone(name, monkeypatch):
    first, later = (
        read(each, Path("/root"), monkeypatch).model_dump() for each in ("glm45_355b", name)
    )
    named = {
        (group, key)
        for group in first
        for key in first[group]
        if first[group][key] != later[group][key]
    }
    assert named == {
        ("cluster", "job_name"),
        ("checkpoint", "hf_checkpoint"),
        ("checkpoint", "ref_load"),
        ("checkpoint", "model"),
        ("assets", "hub_models"),
        ("wandb", "wandb_group"),
    }


def test_errors_of_the_sources_are_corrected(monkeypatch):
    """The product of sizes has no EP in it; 160 experts, not 32; 6 bytes a parameter would not need
    offloading.
    """
    config = read("glm45_355b", Path("/root"), monkeypatch)
    assert config.model_parallel_size * config.data_parallel_size == config.actor_world_size == 64
    assert config.checkpoint.model == "glm45_355b"
    experts = PUBLISHED["glm45_355b"]["n_routed_experts"]
    assert experts == 160 and experts % config.perf.expert_model_parallel_size == 0
    assert config.samples_per_rollout // config.num_steps_per_rollout == 256


@pytest.mark.parametrize(
    "bad",
    [
        "$(touch x)",
        "$lower/x",
        "$A b",
        "${A}",
        "$A;touch x",
        "`x`",
        "$A:$(x)",
        "$A:rel",
        ":/x",
        "$Ax",
    ],
)
def test_nothing_but_a_variable_s_name_reaches_the_shell(bad):
    with pytest.raises(SpecError, match="container_mounts"):
        Container("pyxis", "$RLPOST_IMAGE", (bad,))
    with pytest.raises(SpecError, match=r"container_image|image_cache"):
        Container("pyxis", bad)


def test_variables_of_a_container_are_named_once():
    made = Container(
        "enroot", "$RLPOST_IMAGE", ("$RLPOST_ASSETS/models:/models:ro", "$RLPOST_ASSETS", "/data")
    )
    options = Options(container=made.backend, image=made.image, mount=made.mounts)
    assert needed_variables(options) == ["RLPOST_IMAGE", "RLPOST_ASSETS"]
    assert made.targets == ("/models", "$RLPOST_ASSETS", "/data")


SMALL = {  # tables that differ from tiny.toml
    "tiny_agents": {"eval", "perf", "rollout"},
    "tiny_distill": {"distillation", "rollout", "grpo"},
    "tiny_lora": {"lora", "optimizer"},
    "tiny_muon": {"optimizer", "perf"},
    "tiny_ppo": {"critic", "grpo"},
    "tiny_sft": {"eval", "grpo", "optimizer", "rollout"},
}
OF_A_RECIPE = ("rollout", "grpo", "perf", "eval", "distillation", "lora", "optimizer", "critic")


def test_every_recipe_of_the_tiny_model_is_in_the_table():
    recipes = [path.stem for path in (JOBS / "recipes/small").glob("*.toml")]
    assert sorted(recipes) == sorted([*SMALL, "tiny_images"])


@pytest.mark.slow
def test_the_tiny_recipe_with_images_passes_all_checks_and_fits(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "assets" / tiny_squares.FOLDER
    tiny_squares.make_rows(folder, seed=0)
    make_image_folder(folder)
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    monkeypatch.chdir(tmp_path)
    path = JOBS / "recipes/small/tiny_images.toml"
    config = load([path], {}, base=tmp_path).config
    check(config)
    assert config.takes_images and len(config.eval_sets) == 2
    capsys.readouterr()
    assert plan.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_of_the_tiny_model_passes_all_checks_and_fits(name, tmp_path, monkeypatch, capsys):
    """Only its algorithm differs from tiny.toml; the planner counts what it adds."""
    path = JOBS / f"recipes/small/{name}.toml"
    project = make_project(tmp_path / "made")
    for model, layers in (("tiny", 3), ("tiny-teacher", 6), ("tiny-agents", 3)):
        folder = tmp_path / "assets" / model
        shutil.copytree(project / "model", folder)
        (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
        tokens = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
        for prompts in ("train.jsonl", "heldout.jsonl"):
            shutil.copy(project / "prompts.jsonl", folder / prompts)
        rows = map(json.loads, (project / "prompts.jsonl").read_text().splitlines())
        lines = (json.dumps(as_messages(row)) for row in rows)
        (folder / "messages.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    config = load(files_of(path), {}, base=tmp_path).config
    check(config)
    plain = load([JOBS / "recipes/tiny.toml"], {}, base=tmp_path).config
    assert SMALL[name] == {
        group for group in OF_A_RECIPE if getattr(config, group) != getattr(plain, group)
    }
    assert plan.main([str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"]
    assert any("critic" in phase["parts"] for phase in made["phases"]) is (name == "tiny_ppo")
