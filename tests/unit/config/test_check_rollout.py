"""Settings of rollout, evaluation and debugging that contradict each other are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.checks.algorithm import algorithm_problems
from rlpost.config.checks.data_notes import data_notes
from rlpost.config.checks.layout import layout_problems
from rlpost.config.checks.rollout import (
    debug_problems,
    eval_problems,
    rollout_problems,
    sampling_note,
    staleness_note,
)
from rlpost.config.eval_sets import EvalSet, eval_sets, set_settings
from rlpost.config.groups.eval import EvalConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.load import load, parse_dump
from rlpost.errors import ConfigError


def config(**groups: object):
    """As a driver sees it: read back from run.json."""
    return parse_dump(load([], groups).config.model_dump_json())


def test_engines_of_somebody_else_take_no_gpus_of_the_run_and_share_none() -> None:
    external = {"rollout_external_engine_addrs": ["10.0.0.9:30000"]}
    alone = {"num_gpus_per_node": 4, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 8}
    settings = config(cluster=alone, sglang=external)
    assert (settings.num_engines, settings.num_nodes) == (0, 1)
    assert not layout_problems(settings)
    (problem,) = layout_problems(config(cluster={**alone, "colocate": True}, sglang=external))
    assert "--colocate true with --rollout-external-engine-addrs 10.0.0.9:30000" in problem


def test_an_old_policy_is_kept_where_generation_is_ahead() -> None:
    ahead = {"rollout": {"rollout_mode": "one_step_off"}, "grpo": {"keep_old_actor": True}}
    assert algorithm_problems(config(**ahead)) == []


def test_what_fits_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('datasets = [{name = "a", path = "a.jsonl"}]')
    rollout = {
        "rollout_mode": "fully_async",
        "max_staleness": 2,
        "mask_offpolicy_in_partial_rollout": True,
    }
    settings = config(
        rollout=rollout, debug={"debug_rollout_only": True}, eval={"eval_config": str(file)}
    )
    assert [*rollout_problems(settings), *debug_problems(settings), *eval_problems(settings)] == []


TOML = """
[defaults]
temperature = 0.6
n_samples_per_eval_prompt = 4
[[datasets]]
name = "aime24"
path = "aime.jsonl"
[[datasets]]
name = "gsm8k"
path = "/data/gsm8k.parquet@[0:100]"
temperature = 0.0
rm_type = "gsm8k"
"""
YAML = """
eval:
  defaults: {temperature: 0.6, n_samples_per_eval_prompt: 4}
  datasets:
    - {name: aime24, path: aime.jsonl}
    - {name: gsm8k, path: "/data/gsm8k.parquet@[0:100]", temperature: 0.0, rm_type: gsm8k}
"""


@pytest.mark.parametrize(("name", "text"), [("sets.toml", TOML), ("sets.yaml", YAML)])
def test_sets_come_from_a_file_with_settings_of_their_own(
    tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    given = {"temperature": 0.6, "n_samples_per_eval_prompt": 4}
    assert eval_sets(EvalConfig(eval_config=str(file))) == (
        EvalSet(name="aime24", path=str(tmp_path / "aime.jsonl"), **given),
        EvalSet(
            name="gsm8k",
            path="/data/gsm8k.parquet@[0:100]",
            rm_type="gsm8k",
            **given | {"temperature": 0.0},
        ),
    )


def test_keys_and_limits_for_all_sets_give_way_to_those_of_a_set(tmp_path: Path) -> None:
    file = tmp_path / "sets.toml"
    file.write_text(
        '[[datasets]]\nname = "a"\npath = "a.jsonl"\ninput_key = "question"\n'
        '[[datasets]]\nname = "b"\npath = "b.jsonl"\n'
    )
    given = EvalConfig(
        eval_config=str(file),
        eval_input_key="problem",
        eval_label_key="answer",
        eval_max_prompt_len=7,
        eval_max_context_len=20,
    )
    rollout = RolloutConfig(tool_key="tools", label_key="label", rollout_max_prompt_len=5)
    made = [set_settings(one, given, rollout) for one in eval_sets(given)]
    assert [one.input_key for one in made] == ["question", "problem"]
    for one in made:
        assert (one.label_key, one.tool_key) == ("answer", "tools")
        assert (one.rollout_max_prompt_len, one.rollout_max_context_len) == (7, 20)
    (plain,) = eval_sets(EvalConfig(eval_prompt_data=("a.jsonl",)))
    assert set_settings(plain, EvalConfig(), rollout) == rollout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets = 3", "needs a list 'datasets'"),
        ('[[datasets]]\nname = "a"', r"dataset 1 \(a\): path = .*required"),
        (
            '[[datasets]]\nname = "a"\npath = "b"\ntop_p = 2',
            "top_p = 2: Input should be less than or equal to 1",
        ),
        ('[[datasets]]\nname = "a"\npath = "b"\n' * 2, "two sets are named a"),
        ("[", "not valid TOML"),
        ("other = 1\n[[datasets]]\n", "unknown key 'other'"),
        ('defaults = 3\n[[datasets]]\nname = "a"', "defaults = 3: a table"),
        ('[[datasets]]\nname = "a"\npath = "b"\ntop_k = 0', "top_k = 0: .*-1 for off"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "sets.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"sets.toml.*{message}"):
        eval_sets(EvalConfig(eval_config=str(file)))
    (problem,) = eval_problems(config(eval={"eval_config": str(file)}))
    assert str(file) in problem, "it is told before the job starts"


@pytest.mark.parametrize("table", [{"rollout": {"rollout_top_k": 0}}, {"eval": {"eval_top_k": -2}}])
def test_a_top_k_that_engines_would_refuse_is_refused(table: dict[str, dict[str, int]]) -> None:
    with pytest.raises(ConfigError, match=r"top-k (0|-2): must be 1 or more, or -1 for off"):
        load([], table)


def test_supervised_lines_without_a_label_are_messages() -> None:
    assert config(grpo={"loss_type": "sft_loss"}).applies_chat_template
    with_label = config(grpo={"loss_type": "sft_loss"}, rollout={"label_key": "answer"})
    assert not with_label.applies_chat_template and not config().applies_chat_template
    assert config(rollout={"apply_chat_template": True}).applies_chat_template


BAD_NAMES = {
    "two sets are named a": ("a", "a"),
    "a set is named ''": ("",),
    "a set is named ' '": (" ", "b"),
    r"a set is named 'a\\nb'": ("a\nb",),
    "a set has a NAME of 300 characters": ("x" * 300,),
    "a set has a NAME of 120 characters": ("ä" * 120,),
}


@pytest.mark.parametrize("told", BAD_NAMES)
@pytest.mark.parametrize("form", ["flags", "toml", "yaml"])
def test_names_that_cannot_name_metrics_and_files_are_refused_in_every_form(
    tmp_path: Path, told: str, form: str
) -> None:
    names = BAD_NAMES[told]
    words = [word for name in names for word in (name, "data.jsonl")]
    if form != "flags":
        file = tmp_path / f"sets.{form}"
        sets = {"datasets": [{"name": name, "path": "data.jsonl"} for name in names]}
        lines = [f"[[datasets]]\nname = {json.dumps(name)}\npath = 'p'\n" for name in names]
        file.write_text("".join(lines) if form == "toml" else json.dumps(sets))
    given = {"eval_prompt_data": words} if form == "flags" else {"eval_config": str(file)}
    (problem,) = eval_problems(config(eval=given))
    assert problem.startswith("--eval-") and re.search(told, problem)


@pytest.mark.parametrize(("name", "text"), [("sets.toml", TOML), ("sets.yaml", YAML)])
def test_a_file_of_sets_may_begin_with_a_byte_order_mark_and_is_utf_8(
    tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8-sig")
    assert len(eval_sets(EvalConfig(eval_config=str(file)))) == 2
    file.write_bytes(text.replace("aime24", "aim\xe9").encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{name}: not text in UTF-8"):
        eval_sets(EvalConfig(eval_config=str(file)))


def test_a_sets_reward_by_name_replaces_a_function_of_the_run() -> None:
    rollout = RolloutConfig(custom_rm_path="a.b", group_rm=True)
    own = set_settings(EvalSet(name="a", path="p", rm_type="math"), EvalConfig(), rollout)
    assert (own.rm_type, own.custom_rm_path, own.group_rm) == ("math", None, False)
    inherited = set_settings(EvalSet(name="a", path="p"), EvalConfig(), rollout)
    assert (inherited.custom_rm_path, inherited.group_rm) == ("a.b", True)


EVALUATED = {"eval_prompt_data": ["a", "a.jsonl@[:9]"]}
GREEDY = {"eval_prompt_data": ["a", "a.jsonl"], "eval_temperature": 0.0}


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"eval": GREEDY}, None),
        (
            {"eval": GREEDY | {"n_samples_per_eval_prompt": 8}},
            "set a is decoded greedily.*pass@8 is pass@1",
        ),
        (
            {
                "eval": {
                    "eval_prompt_data": ["a", "a.jsonl"],
                    "eval_top_k": 1,
                    "n_samples_per_eval_prompt": 2,
                }
            },
            "greedily",
        ),
        ({"eval": GREEDY | {"n_samples_per_eval_prompt": 8}, "env": {"env": ["a.b:C"]}}, None),
        (
            {"rollout": {"rollout_top_k": 1, "n_samples_per_prompt": 4}},
            "the 4 responses to a prompt are equal",
        ),
        (
            {"rollout": {"prompt_data": ["a.jsonl", "b.jsonl", "./a.jsonl"]}},
            "--prompt-data has .*a.jsonl twice",
        ),
        ({"rollout": {"prompt_data": ["a.jsonl@[0:9]", "a.jsonl@[9:]"]}}, None),
        (
            {
                "rollout": {"prompt_data": ["a.jsonl"]},
                "eval": {"eval_prompt_data": ["a", "a.jsonl@[:9]"]},
            },
            "set a has prompts of --prompt-data .*a",
        ),
    ],
)
def test_data_and_sampling_that_measure_nothing_are_noted(
    tables: dict[str, Any], told: str | None
) -> None:
    notes = data_notes(config(**tables))
    assert len(notes) == (told is not None)
    assert told is None or re.search(told, notes[0])


def test_a_single_path_is_named_by_its_file() -> None:
    (one,) = eval_sets(EvalConfig(eval_prompt_data=("data/aime24.jsonl",)))
    assert (one.name, one.path) == ("aime24", "data/aime24.jsonl")


MASK = {"use_rollout_sampling_mask": True}


@pytest.mark.parametrize(
    ("rollout", "grpo", "flag"),
    [
        ({"rollout_top_p": 0.9}, {}, "--rollout-top-p 0.9"),
        ({"rollout_top_k": 20}, {}, "--rollout-top-k 20"),
        ({}, {}, None),
        ({"rollout_top_p": 0.9, "rollout_top_k": 20}, MASK, None),
        ({"rollout_top_p": 0.9}, {"loss_type": "sft_loss"}, None),
    ],
)
def test_truncated_sampling_without_its_mask_is_warned_of(rollout, grpo, flag):
    note = sampling_note(config(rollout=rollout, grpo=grpo))
    assert note is None if flag is None else note.startswith(flag)
    assert note is None or "add --use-rollout-sampling-mask" in note


@pytest.mark.parametrize(
    ("rollout", "cause"),
    [
        ({}, None),
        ({"rollout_mode": "one_step_off"}, "--rollout-mode one_step_off"),
        ({"rollout_mode": "fully_async"}, "--rollout-mode fully_async"),
        ({"update_weights_interval": 2}, "--update-weights-interval 2"),
        ({"partial_rollout": True}, "--partial-rollout true"),
        ({"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}, None),
    ],
)
def test_tokens_of_older_weights_without_a_ratio_are_warned_of(rollout, cause):
    note = staleness_note(config(rollout=rollout))
    assert note is None if cause is None else note.startswith(f"{cause}: ")


@pytest.mark.parametrize(
    "grpo",
    [
        {"use_tis": True},
        {"use_rollout_logprobs": True},
        {"keep_old_actor": True},
        {"loss_type": "sft_loss"},
        {"loss_type": "custom_loss"},
    ],
)
def test_a_ratio_or_another_loss_answers_for_older_weights(grpo):
    assert staleness_note(config(rollout={"rollout_mode": "fully_async"}, grpo=grpo)) is None
