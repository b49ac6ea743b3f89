"""Settings from files and flags: what wins, what is refused, and how the refusal reads."""

import json
import re
from pathlib import Path

import pytest

from rlpost.config import flags
from rlpost.config.flags import fields, flag
from rlpost.config.load import dump, load, parse_dump, read_dump
from rlpost.config.path_variables import variable_problems
from rlpost.config.show import resolved
from rlpost.config.tree import Config
from rlpost.durable.result_settings import result_settings
from rlpost.errors import ConfigError
from rlpost.extensions.agents.env_table import EnvConfig


def given(*words):
    namespace, values = flags.parse(flags.make_parser("test", ""), words)
    return namespace, values


def refusal(*words, files=()):
    with pytest.raises(ConfigError) as caught:
        load(files, given(*words)[1])
    return str(caught.value)


def write(folder, text, name="recipe.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_flags_win_over_files_and_later_files_over_earlier_ones(tmp_path):
    recipe = write(tmp_path, "[cluster]\nnodes = 2\npartition = 'a'\n[optimizer]\nlr = 1e-5\n")
    cluster = write(tmp_path, "[cluster]\npartition = 'b'\ntime = '1:00:00'\n", "cluster.toml")
    loaded = load([recipe, cluster], given("--nodes", "4")[1])
    assert (
        loaded.config.cluster.nodes,
        loaded.config.cluster.partition,
        loaded.config.optimizer.lr,
    ) == (4, "b", 1e-5)
    assert loaded.origins["cluster.nodes"] == "the command line"
    assert loaded.origins["cluster.partition"] == str(cluster)
    assert "cluster.account" not in loaded.origins


def test_none_takes_back_what_an_earlier_file_said(tmp_path):
    recipe = write(
        tmp_path,
        "[cluster]\npartition = 'a'\n[eval]\neval_interval = 20\n[checkpoint]\nsave = 'x'\n",
    )
    cluster = write(tmp_path, "[cluster]\npartition = 'none'\n", "cluster.toml")
    loaded = load([recipe, cluster], given("--eval-interval", "none", "--save", "none")[1])
    config = loaded.config
    assert (config.cluster.partition, config.eval.eval_interval, config.checkpoint.save) == (
        None,
        None,
        None,
    )
    assert loaded.origins["cluster.partition"] == str(cluster)
    assert re.search("# eval_interval is not set +# the command line", resolved(loaded))


def test_every_setting_that_is_empty_by_default_takes_none_and_those_with_a_value_of_that_name_keep_it():
    empty = {
        key: group
        for key, group in flags.fields().items()
        if getattr(getattr(Config(), group), key) is None
    }
    assert {"eval_interval", "partition", "offload_train", "bf16", "save_hf"} < empty.keys()
    config = load(
        [], given(*(word for key in empty for word in (flags.flag(key), "none")))[1]
    ).config
    assert config == load([], {}).config
    assert load([], given("--container", "none")[1]).config.cluster.container == "none"
    assert "--lr none: must be a number" in refusal("--lr", "none")


def test_every_leaf_of_the_tree_is_a_flag_of_its_own_name_with_help():
    text = flags.make_parser("test", "").format_help_all()
    for key, group in flags.fields().items():
        assert flags.flag(key) in text
        assert flags.groups()[group].model_fields[key].description, (
            f"{group}.{key} has no help text"
        )


def test_no_key_stands_in_two_groups():
    keys = [key for group in flags.groups().values() for key in group.model_fields]
    assert len(keys) == len(set(keys))


def test_no_before_a_switch_turns_it_off_and_before_another_flag_is_refused():
    assert given("--no-colocate")[1] == {"cluster": {"colocate": "false"}}
    with pytest.raises(
        ConfigError, match=r"--no-lr: unknown setting; --help-all lists every setting"
    ):
        given("--no-lr")
    assert given("--colocate", "false")[1] == {"cluster": {"colocate": "false"}}


@pytest.mark.parametrize("text", ["[cluster\n", "nodes = 1\n"])
def test_a_broken_file_is_named(tmp_path, text):
    assert str(write(tmp_path, text)) in refusal(files=[tmp_path / "recipe.toml"])


def test_a_missing_file_is_named_with_its_neighbours(tmp_path):
    write(tmp_path, "", "other.toml")
    assert "other.toml" in refusal(files=[tmp_path / "recipe.toml"])


def test_relative_paths_become_absolute_and_absolute_ones_stay(tmp_path):
    _, values = given("--hf-checkpoint", "a", "--prompt-data", "/b", "--eval-prompt-data", "x", "c")
    config = load([], values, base=tmp_path).config
    assert config.checkpoint.hf_checkpoint == str(tmp_path / "a")
    assert config.rollout.prompt_data == ("/b",)
    assert config.eval_sets == (("x", str(tmp_path / "c")),)
    assert config.checkpoint.save is None


def test_options_for_sglang_itself_pass_through_with_their_types():
    words = "--sglang-mem-fraction-static 0.7 --sglang-enable-x --sglang-cuda-graph-bs 1 2 4"
    words += " --sglang-tool-call-parser=q"
    config = load([], given(*words.split(), "--nodes", "2")[1]).config
    expected = {
        "mem_fraction_static": 0.7,
        "enable_x": True,
        "cuda_graph_bs_decode": [1, 2, 4],
        "tool_call_parser": "q",
    }
    assert config.sglang.server_args == expected
    assert config.cluster.nodes == 2


def test_a_switch_may_be_given_a_value_to_turn_it_off_again(tmp_path):
    recipe = write(tmp_path, "[perf]\nbalance_data = true\n")
    assert load([recipe], given("--balance-data", "false")[1]).config.perf.balance_data is False
    assert load([], given("--balance-data")[1]).config.perf.balance_data is True


def test_sequence_parallelism_has_no_effect_without_tensor_parallelism():
    assert not load([], given("--sequence-parallel")[1]).config.perf.sequence_parallel
    words = given("--sequence-parallel", "--tensor-model-parallel-size", "2")
    assert load([], words[1]).config.perf.sequence_parallel


def test_a_dumped_tree_reads_back_equal():
    config = load(
        [], given("--sglang-foo", "1", "--eval-prompt-data", "a", "b", "--eps-clip-high", "0.28")[1]
    ).config
    assert parse_dump(dump(config)) == config
    assert json.loads(dump(config))["grpo"]["eps_clip_high"] == 0.28


def test_every_shipped_recipe_and_cluster_loads():
    folder = Path(__file__).parents[3] / "jobs"
    found = sorted(folder.glob("**/*.toml"))
    assert found
    for path in found:
        assert isinstance(load([path], {}).config, Config)


def test_the_folder_of_assets_may_begin_with_a_variable_of_the_site(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    groups = {
        "cluster": {"assets_dir": "$SCRATCH/hub"},
        "checkpoint": {"hf_checkpoint": "$RLPOST_ASSETS/Qwen3-4B"},
    }
    found = load([], groups).config
    assert (found.checkpoint.hf_checkpoint, found.cluster.assets_dir) == (
        "/scratch/me/hub/Qwen3-4B",
        "/scratch/me/hub",
    )
    assert variable_problems(found) == []


@pytest.mark.parametrize("key", ["runs_dir", "assets_dir", "image_cache"])
def test_a_folder_of_the_profile_whose_variable_is_not_set_is_named(key, monkeypatch):
    """Else a folder of that very name would be made."""
    monkeypatch.delenv("SCRATCH", raising=False)
    (problem,) = variable_problems(load([], {"cluster": {key: "$SCRATCH/x"}}).config)
    assert problem.startswith(
        f"$SCRATCH is not set, and {flags.flag(key)} begins with it; export SCRATCH="
    )


def test_a_variable_of_any_path_is_named_and_a_word_that_ends_answers_is_none(monkeypatch):
    monkeypatch.delenv("SCRATCH", raising=False)
    here = "$SCRATCH/x"
    groups = {
        "rollout": {"prompt_data": [f"{here}@[0:8]"], "rollout_stop": ["$END"]},
        "eval": {"eval_prompt_data": ["held_out", here]},
        "cluster": {
            "container_image": here,
            "container": "pyxis",
            "container_mounts": [f"{here}:/data"],
        },
        "sglang": {"sglang_download_dir": here},
    }
    (problem,) = variable_problems(load([], groups).config)
    for key in (
        "--prompt-data",
        "--eval-prompt-data",
        "--container-image",
        "--container-mounts",
        "--sglang-download-dir",
    ):
        assert key in problem
    assert problem.startswith("$SCRATCH is not set") and "stop" not in problem


def test_a_variable_that_is_set_has_its_value_in_options_of_sglang_too(monkeypatch):
    monkeypatch.setenv("RLPOST_ASSETS", "/hub")
    groups = {
        "sglang": {
            "sglang_speculative_draft_model_path": "$RLPOST_ASSETS/draft",
            "sglang_dtype": "auto",
        }
    }
    found = load([], groups).config
    assert found.sglang.server_args == {
        "speculative_draft_model_path": "/hub/draft",
        "dtype": "auto",
    }
    assert variable_problems(found) == []


def test_a_relative_folder_of_assets_makes_an_absolute_mount(tmp_path):
    """A container's mounts begin with the same variable as the paths."""
    groups = {
        "cluster": {
            "assets_dir": "hub",
            "container_mounts": ["$RLPOST_ASSETS", "$RLPOST_ASSETS:/data:ro"],
        }
    }
    found = load([], groups, base=tmp_path).config.cluster
    assert found.container_mounts == (f"{tmp_path}/hub", f"{tmp_path}/hub:/data:ro")
    assert found.assets_dir == f"{tmp_path}/hub"


def test_an_unset_setting_that_an_earlier_version_wrote_is_ignored_and_a_set_one_is_not():
    stored = json.loads(dump(Config()))
    stored["observe"]["otlp_endpoint"] = None
    stored["grpo"]["loss_unit"] = "sample"  # without a meaning: answers always count as one
    assert parse_dump(json.dumps(stored)) == Config()
    stored["observe"]["otlp_endpoint"] = "http://collector:4318"
    with pytest.raises(ValueError, match=r"--otlp-endpoint http:.*use --trace-steps"):
        parse_dump(json.dumps(stored))
    stored["theirs"] = {"key": 1}
    config, lines = read_dump(json.dumps(stored))
    assert len(lines) == 2 and any(line.endswith("has no table [theirs]") for line in lines)
    assert config.model_dump() == Config().model_dump()
    with pytest.raises(ConfigError, match="--lr fast: must be a number"):
        parse_dump(json.dumps({"optimizer": {"lr": "fast"}}))


def test_settings_that_an_earlier_version_stored_are_read() -> None:
    """run_of_0_2.json was written before extensions brought the tables [env] and [sandbox]."""
    stored = json.loads(Path(__file__).with_name("run_of_0_2.json").read_text())
    config = parse_dump(json.dumps(stored))
    environment = config.model_dump(mode="json")["env"]
    assert environment == stored["env"] and environment["env"] == ["pkg.mod:Game"]
    decided = json.loads(result_settings(config).to_json())["generated"]
    assert decided.keys() & environment.keys() == EnvConfig.decides <= environment.keys()
    plain = parse_dump(dump(Config()))
    assert "env" not in json.loads(result_settings(plain).to_json())["generated"]
    assert not {"env", "sandbox"} & json.loads(dump(plain)).keys()
    assert json.loads(dump(config))["sandbox"]["sandbox_places"] == 4


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_no_setting_is_nan_or_infinite(value):
    """JSON, in which a run keeps its settings, has no such numbers."""
    floats = [
        (table, key)
        for key, table in fields().items()
        if "float" in str(getattr(Config(), table).__class__.model_fields[key].annotation)
    ]
    assert len(floats) > 40
    for table, key in floats:
        field = getattr(Config(), table).__class__.model_fields[key]
        given = (float(value),) if "tuple" in str(field.annotation) else float(value)
        with pytest.raises(ConfigError, match=flag(key)):
            load([], {table: {key: given}})
