"""The tables [engines.NAME]: GPUs add up, names exist, models fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.check import _group_lines
from rlpost.cli.engine_groups import (
    group_args_problems,
    group_folder_problems,
    head_problem,
)
from rlpost.config.checks.container import container_problems
from rlpost.config.checks.engine_groups import (
    engine_group_problems,
    group_model_problems,
    key_notes,
    spare_model_problems,
)
from rlpost.config.checks.layout import layout_problems
from rlpost.config.checks.missing import missing_problems
from rlpost.config.engine_groups import engines_to_place, group_config
from rlpost.config.groups.engines import EngineGroup, EnginesConfig
from rlpost.config.load import dump, load, parse_dump
from rlpost.config.path_variables import variable_problems
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.planning.plan_engines import PlannedGroup

JUDGE = {"model": "/m", "engines": 2, "gpus": 2}
BOX = {"num_gpus_per_node": 8, "actor_num_gpus_per_node": 4, "colocate": True, "nodes": 1}
FLEET = {**JUDGE, "fleet": True}
URL_GROUP = {"url": "http://h:1"}


def config_of(judge: dict[str, Any], **groups: Any) -> Config:
    return load([], {"engines": {"judge": judge}, **groups}).config


def problems(judge: dict[str, Any], **groups: Any) -> list[str]:
    return engine_group_problems(config_of(judge, **groups))


def test_engines_of_a_group_have_its_model_size_and_settings_and_none_of_the_policys() -> None:
    judge = {**JUDGE, "sglang_mem_fraction_static": 0.7, "concurrency": 9}
    policy = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}
    config = config_of(
        judge,
        cluster={**BOX, "colocate": False, **policy, "nodes": 2},
        sglang={"sglang_context_length": 99},
        grpo={"use_rollout_routing_replay": True},
    )
    own = group_config(config, "judge")
    assert own.checkpoint.hf_checkpoint == "/m" and own.num_engines == 2
    assert own.cluster.rollout_num_gpus_per_engine == 2 and not own.offload_rollout
    assert own.sglang.server_args == {"mem_fraction_static": 0.7}
    assert own.sglang.sglang_server_concurrency == 9 and not own.grpo.use_rollout_routing_replay
    assert group_config(config, "policy") is config
    assert engines_to_place(config) == [("policy", 4), ("judge", 2), ("judge", 2)]
    assert parse_dump(dump(config)) == config and settings_of(config)["judge"] is None


def test_nodes_of_the_run_include_those_of_groups() -> None:
    two = {"num_gpus_per_node": 8, "actor_num_gpus_per_node": 8, "colocate": True}
    assert config_of(JUDGE, cluster={**BOX, "nodes": None}).num_nodes == 1
    assert config_of(JUDGE, cluster=two).num_nodes == 2
    assert config_of({**JUDGE, "gpus": None, "nodes": 2}, cluster=two).num_nodes == 5
    assert config_of(URL_GROUP, cluster=two).num_nodes == 1
    assert config_of(FLEET, cluster=two).num_nodes == 1, "its engines are on other jobs"
    assert config_of(FLEET, cluster=two).num_group_gpus == 0
    assert group_config(config_of(FLEET, cluster=two), "judge").num_engines == 0
    assert config_of({**JUDGE, "nodes": 2}, cluster=two).engines.started["judge"].gpus_per_engine(8)


@pytest.mark.parametrize(
    ("judge", "cluster"),
    [
        (JUDGE, BOX),
        ({**JUDGE, "gpus": None, "nodes": 1}, {**BOX, "nodes": 3, "actor_num_nodes": 1}),
        (URL_GROUP, {**BOX, "actor_num_gpus_per_node": 8}),
        (FLEET, {**BOX, "actor_num_gpus_per_node": 8}),
        ({**FLEET, "engines": 0}, {**BOX, "actor_num_gpus_per_node": 8}),
    ],
)
def test_what_can_run(judge: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert problems(judge, cluster=cluster) == []
    assert layout_problems(config_of(judge, cluster=cluster)) == []


@pytest.mark.parametrize(
    ("judge", "cluster", "words"),
    [
        (
            JUDGE,
            {**BOX, "actor_num_gpus_per_node": 6},
            "[engines.judge]: engines need 2 x 2 of [engines.judge] = 4 GPUs, and next to the trainer "
            "1 x 8 GPUs leave 2 (free GPUs per node: 2); use --nodes 2 --actor-num-nodes 1, or",
        ),
        (
            {**JUDGE, "gpus": 4},
            {**BOX, "colocate": False, "rollout_num_gpus": 2},
            "engines need 2 x 4 of [engines.judge] + 2 x 1 of the policy = 10 GPUs, and next to the "
            "trainer 1 x 8 GPUs leave 4 (free GPUs per node: 4); use --nodes 2 --actor-num-nodes 1",
        ),
        (
            {**JUDGE, "gpus": 12},
            {**BOX, "nodes": 4},
            "[engines.judge] gpus = 12 is more than a node and not a multiple of --num-gpus-per-node 8",
        ),
    ],
)
def test_gpus_that_do_not_add_up_are_summed(
    judge: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    (problem,) = layout_problems(config_of(judge, cluster=cluster))
    assert words in problem


@pytest.mark.parametrize(
    ("judge", "groups", "words"),
    [
        ({}, {}, "[engines.judge] needs a model; add model = FOLDER, follows_policy = true"),
        (
            {**URL_GROUP, "gpus": 2},
            {},
            "url names servers that exist, and gpus is for engines that",
        ),
        ({**URL_GROUP, "sglang_tp": 1}, {}, "and sglang_tp is for engines"),
        ({**JUDGE, "nodes": 1}, {}, "gpus = 2 and nodes = 1: both are the size of an engine"),
        ({**JUDGE, "api_key_env": "K"}, {}, "api_key_env without url"),
        (
            {**JUDGE, "engines": 0},
            {},
            "engines = 0: the group has no engine; use 1 or more, or fleet",
        ),
        (
            {**URL_GROUP, "fleet": True},
            {},
            "and fleet is for engines that the run starts; leave one",
        ),
        (
            {**URL_GROUP, "api_key_env": "JUDGE"},
            {},
            "api_key_env = 'JUDGE': the name must end in _ENGINES_KEY",
        ),
        (
            {**URL_GROUP, "api_key_env": "HF_TOKEN"},
            {},
            "api_key_env = 'HF_TOKEN': the name must end in _ENGINES_KEY or be SGLANG_API_KEY",
        ),
        (
            {**URL_GROUP, "api_key_env": "WANDB_API_KEY"},
            {},
            "api_key_env = 'WANDB_API_KEY': the name must end in _ENGINES_KEY",
        ),
        (
            {**URL_GROUP, "api_key_env": "A_ENGINES_KEY", "api_key_file": "/k"},
            {},
            "api_key_env and api_key_file; leave one of them out",
        ),
        (JUDGE, {"grpo": {"loss_type": "sft_loss"}}, "--loss-type sft_loss generates nothing"),
        (
            JUDGE,
            {"distillation": {"opd_teacher_engines": "jugde"}},
            "--opd-teacher-engines jugde: no such group of engines; did you mean 'judge'?",
        ),
    ],
)
def test_what_cannot_run_is_named_with_a_remedy(
    judge: dict[str, Any], groups: dict[str, Any], words: str
) -> None:
    (problem,) = problems(judge, **groups)
    assert words in problem


def test_a_table_with_the_name_of_a_short_form_is_a_contradiction() -> None:
    rollout = {"rm_url": "http://r:1"}
    config = load([], {"engines": {"reward": URL_GROUP}, "rollout": rollout}).config
    assert engine_group_problems(config) == [
        "[engines.reward] and --rm-url, which is the short form of a group of that name; leave one of "
        "them out"
    ]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"policy": {}}, "[engines.policy]: the policy's engines are those of"),
        ({"Judge": {}}, "a name has lower-case letters, digits and _"),
        (
            {"judge": {"modle": "/m"}},
            "unknown key 'modle' in [engines.judge]; did you mean 'model'?",
        ),
        ({"judge": 3}, "engines.judge = 3: must be a table"),
        ({"judge": {"engines": -1}}, "engines -1 in [engines.judge]: must be 0 or more"),
        ({"judge": {"url": "h:1"}}, "url h:1 in [engines.judge]: 'h:1' must start with http://"),
    ],
)
def test_a_wrong_table_is_an_error_with_its_name(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([], {"engines": tables})
    assert words in str(error.value)


def test_a_later_file_changes_single_keys_of_a_group(tmp_path: Path) -> None:
    recipe, site = tmp_path / "recipe.toml", tmp_path / "site.toml"
    recipe.write_text('[engines.judge]\nmodel = "judge"\nengines = 2\n')
    site.write_text("[engines.judge]\nengines = 1\n")
    group = load([recipe, site], {}, base=tmp_path).config.engines.groups["judge"]
    assert group.engines == 1 and group.model == str(tmp_path / "judge")


def test_a_head_that_sglang_gives_a_random_bias_is_refused_without_one() -> None:
    head = {"architectures": ["Qwen3ForSequenceClassification"]}
    problem = head_problem(head, {"score.weight"})
    assert problem is not None and "add a tensor score.bias" in problem
    assert head_problem(head, {"score.weight", "score.bias"}) is None
    assert head_problem({"architectures": ["LlamaForSequenceClassification"]}, set()) is None


HF = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "vocab_size": 100}


def test_weights_of_the_policy_need_its_architecture() -> None:
    config = config_of({"model": "/m", "follows_policy": True})
    assert group_model_problems(config, "judge", HF, HF) == []
    (problem,) = group_model_problems(config, "judge", {**HF, "hidden_size": 32}, HF)
    assert "differ in hidden_size 32 and 64" in problem and "leave model out" in problem
    (problem,) = group_model_problems(config, "judge", {**HF, "quantization_config": {"a": 1}}, HF)
    assert "use a checkpoint in bf16" in problem
    keeps = config_of({"model": "/m"})
    assert group_model_problems(keeps, "judge", {**HF, "hidden_size": 32}, HF) == []


def test_the_paths_of_groups_need_their_variables_and_their_mounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RLPOST_ASSETS", raising=False)
    (line,) = variable_problems(config_of({"model": "$RLPOST_ASSETS/judge"}))
    assert line.startswith("$RLPOST_ASSETS is not set, and model of [engines.judge] begins with it")
    image = {"container": "enroot", "container_image": "/i.sqsh"}
    (line,) = container_problems(config_of({"model": "/models/judge"}, cluster=image))
    assert "model of [engines.judge] /models/judge" in line and "--container-mounts" in line


def test_folders_and_sglang_settings_of_groups_are_checked(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    judge = {"model": str(tmp_path / "judge"), "sglang_mem_fraction_statc": 0.5}
    config = config_of(judge)
    (problem,) = group_args_problems(config)
    assert (
        problem.startswith("[engines.judge]: --sglang-mem-fraction-statc") and "did you" in problem
    )
    (problem,) = group_folder_problems(config)
    assert "config.json cannot be read" in problem and "[engines.judge]" in problem
    (tmp_path / "judge/config.json").write_text(json.dumps(HF))
    assert not any("config.json" in problem for problem in group_folder_problems(config))
    missing = missing_problems(config_of({"model": "/nowhere/m"}), None)
    assert any("model of [engines.judge] /nowhere/m" in problem for problem in missing)


FOLLOWS = {"follows_policy": True}


@pytest.mark.parametrize(
    ("judge", "evaluation", "words"),
    [
        (FOLLOWS, {"eval_engines": "judge"}, "without --eval-interval evaluates nothing"),
        (FOLLOWS, {}, "only the engines of --eval-engines get weights of the policy"),
        (
            JUDGE,
            {"eval_engines": "judge", "eval_interval": 2},
            "[engines.judge] keeps weights of its own; add follows_policy = true",
        ),
        (
            JUDGE,
            {"eval_engines": "jugde", "eval_interval": 2},
            "--eval-engines jugde: no such group of engines; did you mean 'judge'?",
        ),
    ],
)
def test_engines_that_evaluate_follow_the_policy(
    judge: dict[str, Any], evaluation: dict[str, Any], words: str
) -> None:
    (problem,) = problems(judge, eval=evaluation)
    assert words in problem
    assert problems(FOLLOWS, eval={"eval_engines": "judge", "eval_interval": 2}) == []


OWN_GPUS = {"num_gpus_per_node": 8, "actor_num_gpus_per_node": 4}
SPARE = {"eval_engines": "policy", "eval_interval": 2}


@pytest.mark.parametrize(
    ("cluster", "evaluation", "words"),
    [
        ({**OWN_GPUS, "colocate": True}, SPARE, "--eval-engines policy with --colocate: no engine"),
        (
            {**OWN_GPUS, "rollout_num_gpus": 2},
            {**SPARE, "eval_policy_engines": 2},
            "--eval-policy-engines 2 of 2 engines of the run's own job leaves none that generates; use "
            "--rollout-num-gpus 3 or more",
        ),
        ({**OWN_GPUS, "rollout_num_gpus": 2}, {"eval_engines": "policy"}, "add --eval-interval"),
    ],
)
def test_spare_engines_of_the_policy_evaluate_if_another_one_generates(
    cluster: dict[str, Any], evaluation: dict[str, Any], words: str
) -> None:
    config = load([], {"cluster": cluster, "eval": evaluation}).config
    (problem,) = engine_group_problems(config)
    assert words in problem
    fits = load([], {"cluster": {**OWN_GPUS, "rollout_num_gpus": 2}, "eval": SPARE}).config
    assert engine_group_problems(fits) == [] and spare_model_problems(fits, {}) == []
    (problem,) = spare_model_problems(fits, {"quantization_config": {"a": 1}})
    assert "use a checkpoint in bf16" in problem


def test_plan_and_check_show_which_engines_are_on_other_jobs() -> None:
    assert PlannedGroup("judge", 2, 4, "/m", None, in_fleet=True).words.startswith(
        "2 engines x 4 GPUs on other jobs; "
    )
    (line,) = _group_lines(config_of(FLEET))
    assert line == ("engines judge", "2 engines x 2 GPUs = 4, on other jobs")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://judge.site.org/v1", "J_ENGINES_KEY is sent to judge.site.org$"),
        ("http://127.0.0.1:1/v1", "J_ENGINES_KEY is sent to 127.0.0.1$"),
        ("http://evil.example:1/v1", "sent to evil.example over http, readable on the network"),
    ],
)
def test_a_note_says_where_a_key_goes(url: str, words: str) -> None:
    settings = EngineGroup(url=url, api_key_env="J_ENGINES_KEY")
    config = Config(engines=EnginesConfig(judge=settings))
    (line,) = key_notes(config)
    assert re.search(words, line) and line.startswith("[engines.judge]")
    assert not key_notes(Config(engines=EnginesConfig(judge=EngineGroup(url=url))))
