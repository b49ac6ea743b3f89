"""jobs/models: published config.json files, which describe a model before its folder is here."""

import json
from pathlib import Path

import pytest

from rlpost.cli.check_settings import check
from rlpost.config.load import JOBS, _with_earlier, files_of, load
from rlpost.config.model_file import (
    MODELS,
    model_path,
    named_in,
    other_model_problem,
    read_model,
)
from rlpost.errors import ConfigError
from rlpost.extensions.planning import plan_verb as plan
from rlpost.models.families import FAMILIES
from rlpost.trainer.model_description import description_of

PUBLISHED = {path.stem: read_model(path) for path in sorted(MODELS.glob("*.json"))}
"""config.json of each model on the Hugging Face hub, so far as it decides size and computation;
``test_published_sizes`` compares with the sizes that their makers state."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_file_describes_a_model_that_can_be_trained(name):
    path = MODELS / f"{name}.json"
    found = description_of(load([], {"checkpoint": {"model": name}}).config)
    assert found.path == path and found.tensors == ()
    assert named_in(path).endswith(".")
    assert found.family.carried or PUBLISHED[name]["model_type"] == found.family.model_type
    assert not found.family.carried or found.family.vision, "the language model alone, or the whole"


def test_every_family_has_the_name_of_its_configuration():
    names = [family.model_type for family in FAMILIES.values() if not family.carried]
    assert all(names) and len(set(names)) == len(names)


def test_a_recipe_names_its_model_and_cluster_in_place_of_tables(tmp_path):
    """Defaults < recipe < cluster < flags; a path is relative to the file that names it."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("model = 'mine.json'\ncluster = 'local'\n[optimizer]\nlr = 2e-5\n")
    files = files_of(recipe)
    assert files == [recipe, JOBS / "clusters/local.toml"]
    loaded = load(files, {})
    assert loaded.config.checkpoint.model == str(tmp_path / "mine.json")
    assert loaded.origins["checkpoint.model"] == str(recipe)
    assert loaded.config.cluster.gpu_request == "none"
    for word, kept in (("qwen3_4b", "qwen3_4b"), ("none", None)):
        flags = {"checkpoint": {"model": word}}
        assert load(files, flags).config.checkpoint.model == kept
    assert files_of(recipe, "x.toml")[-1] == Path("x.toml")


def test_the_folder_s_own_config_decides_as_soon_as_it_is_here(tmp_path):
    settings = {"checkpoint": {"model": "qwen3_4b", "hf_checkpoint": str(tmp_path)}}
    config = load([], settings).config
    assert model_path(config.checkpoint) == MODELS / "qwen3_4b.json"
    further = PUBLISHED["qwen3_4b"] | {"rope_theta": 5e6}
    (tmp_path / "config.json").write_text(json.dumps(further))
    assert description_of(config).rope["rope_theta"] == 5e6
    assert other_model_problem(config.checkpoint) is None, "a longer context of the same model"
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen2_5_7b"]))
    problem = other_model_problem(config.checkpoint)
    assert "num_hidden_layers, hidden_size" in problem and "use --model none to take" in problem


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "not a JSON object")],
)
def test_a_file_that_describes_no_model_is_named(content, problem, tmp_path):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"mine.json: {problem}"):
        read_model(path)


def test_a_table_model_of_an_earlier_version_is_refused_with_what_to_do(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[model]\nnum_layers = 3\nmoe_grouped_gemm = true\noverride_hf_config = ['rotary_base']\n"
    )
    with pytest.raises(ConfigError) as raised:
        load([recipe], {})
    said = str(raised.value)
    assert "config.json of --hf-checkpoint states the architecture; delete the table" in said
    assert "move moe_grouped_gemm to [perf]" in said and "override_hf_config = {rotary" in said
    with pytest.raises(ConfigError, match=r"--model old\.toml: a model is described by its config"):
        load([], {"checkpoint": {"model": "old.toml"}})
    recipe.write_text("[perf]\nnum_layers = 3\n[megatron]\nhidden_size = 3\n")
    with pytest.raises(ConfigError) as raised:
        load([recipe], {})
    assert str(raised.value).count("config.json states it: leave it out") == 2


def test_overrides_of_recipe_and_command_line_are_merged_by_name() -> None:
    recipe = {"checkpoint": {"override_hf_config": {"rotary_base": 5e5, "norm_epsilon": 1e-6}}}
    flags = {"checkpoint": {"override_hf_config": ["norm_epsilon=1e-5"]}}
    earlier, value = recipe["checkpoint"], flags["checkpoint"]
    key = "override_hf_config"
    merged = _with_earlier(earlier[key], value[key], group="checkpoint", key=key)
    loaded = load([], {"checkpoint": {key: merged}}).config.checkpoint.override_hf_config
    assert loaded == {"rotary_base": 5e5, "norm_epsilon": 1e-5}


def test_a_recipe_overrides_the_keys_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text(
        "model = 'qwen3_4b'\n[optimizer]\nlr = 1e-6\nweight_decay = 0.5\n"
    )
    recipe = tmp_path / "second.toml"
    recipe.write_text("base = 'first.toml'\n[optimizer]\nlr = 2e-6\n")
    loaded = load(files_of(recipe), {})
    assert (loaded.config.optimizer.lr, loaded.config.optimizer.weight_decay) == (2e-6, 0.5)
    assert loaded.config.checkpoint.model == "qwen3_4b"
    assert loaded.origins["optimizer.weight_decay"] == str(tmp_path / "first.toml")
    (tmp_path / "third.toml").write_text("base = 'second.toml'\n")
    with pytest.raises(ConfigError, match=r"has a base itself; name 'first\.toml' instead"):
        files_of(tmp_path / "third.toml")
    recipe.write_text("base = 'glm45'\n")
    with pytest.raises(ConfigError, match=r"glm45: no such base; did you mean glm4"):
        files_of(recipe)


def test_a_name_that_is_no_model_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"qwen9: no such model; .*jobs/models has \w+, "):
        load([], {"checkpoint": {"model": "qwen9"}})


def test_arguments_that_contradict_the_published_file_are_named_before_the_folder_is_here():
    stated = {"checkpoint": {"model": "qwen3_4b", "model_args": {"num_layers": "5"}}}
    with pytest.raises(ConfigError, match=r"--num-layers 5, .* says 36; use --num-layers 36"):
        plan.model_of(load([], stated).config)
    stated["checkpoint"]["hf_checkpoint"] = "/nowhere"
    with pytest.raises(ConfigError, match=r"--num-layers 5, .* says 36"):
        check(load([], stated).config, is_dry=True)
    with pytest.raises(ConfigError, match=r"mine\.json: cannot be read"):
        description_of(load([], {"checkpoint": {"model": "/nowhere/mine.json"}}).config)
