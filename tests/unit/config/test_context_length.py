"""Lengths of prompts and responses against the context of the model and the time of a job."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.main import main
from rlpost.config.checks.context_length import context_notes, context_problems, engine_context
from rlpost.config.load import load
from tests.unit.cli.projects import make_project

MODEL = {"max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("rollout", "evaluation", "words"),
    [
        ({"rollout_max_response_len": 4095}, {}, None),
        ({"rollout_max_response_len": 4096}, {}, "--rollout-max-response-len 4096 leaves no token"),
        ({"rollout_max_response_len": 8192, "rollout_max_context_len": 4096}, {}, None),
        ({"rollout_max_context_len": 4097}, {}, "use --rollout-max-context-len 4096"),
        ({}, {"eval_max_response_len": 4096}, "--eval-max-response-len 4096 leaves no token"),
        (
            {"rollout_max_context_len": 4096},
            {"eval_max_context_len": 9000, "eval_max_response_len": 10},
            "--eval-max-context-len 9000 is more than the 4096 tokens",
        ),
    ],
)
def test_lengths_that_every_engine_rejects_are_refused(rollout, evaluation, words) -> None:
    evaluation = {"eval_interval": 1, "eval_prompt_data": ["held", "held.jsonl"], **evaluation}
    config = load([], {"rollout": rollout, "eval": evaluation}).config
    problems = context_problems(config, MODEL)
    assert len(problems) == (words is not None) and all(words in line for line in problems)


def test_a_permitted_prompt_that_an_engine_may_reject_is_noted() -> None:
    rollout = {"rollout_max_response_len": 3000, "rollout_max_prompt_len": 1097}
    config = load([], {"rollout": rollout}).config
    (note,) = context_notes(config, MODEL)
    assert "rejects a prompt of more than 1096 tokens" in note
    fits = load([], {"rollout": {**rollout, "rollout_max_prompt_len": 1096}}).config
    assert not context_problems(config, MODEL) and not context_notes(fits, MODEL)


def sglang_function(name: str, constant: str) -> Callable[[object], int]:
    """A function of SGLang's source and the constant that it reads, without importing the rest."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    path = Path(spec.origin).parent / "srt/utils/hf_transformers/common.py"
    found: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        is_constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant
        if is_constant or (isinstance(node, ast.FunctionDef) and node.name == name):
            found.append(node)
    scope: dict[str, Any] = {}
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return scope[name]


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "llama3", "factor": 8.0},
    ],
)
def test_the_context_is_that_of_sglang(scaling) -> None:
    of_sglang = sglang_function("get_context_length", "CONTEXT_LENGTH_KEYS")
    hf = MODEL if scaling is None else {**MODEL, "rope_scaling": scaling}
    read = type("Read", (), hf)
    assert engine_context(load([], {}).config, hf) == of_sglang(read)
    given = load([], {"sglang": {"sglang_context_length": 1000}}).config
    assert engine_context(given, hf) == 1000


def test_check_notes_a_time_limit_that_a_start_may_use_up(tmp_path: Path, capsys) -> None:
    recipe = make_project(tmp_path) / "recipe.toml"
    words = ["check", str(recipe), "--hf-checkpoint", str(tmp_path / "model"), "--json"]
    words += ["--prompt-data", str(tmp_path / "prompts.jsonl"), "--signal-lead-s", "120"]
    assert main([*words, "--time", "12"]) == 0  # 12 min = 120 s of lead and 600 s of start
    assert json.loads(capsys.readouterr().out)["notes"] == []
    assert main([*words, "--time", "11"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("--time 11: the signal to save comes 540 s after the start")
    assert "--bringup-deadline-s 600" in note and "use --time 13 (minutes) or more" in note
