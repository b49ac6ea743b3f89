"""Lengths of prompts and responses against the context of the model and the time of a job."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock, Mock

import pytest

from rlpost.cli.main import main
from rlpost.config.checks.context_length import (
    UNREAD_TOKENS,
    context_notes,
    context_problems,
    engine_context,
    longest_request,
    pool_tokens,
    with_pool,
)
from rlpost.config.load import load
from rlpost.config.server_arg_values import POOL_WITHOUT_GPUS
from rlpost.driver import run_stages
from rlpost.driver.run_stages import RunStages
from rlpost.engines import server
from tests.unit.cli.projects import make_project

MODEL = {"max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("rollout", "evaluation", "words"),
    [
        ({"rollout_max_response_len": 4089}, {}, None),
        ({"rollout_max_response_len": 4090}, {}, "--rollout-max-response-len 4090 leaves no token"),
        ({"rollout_max_response_len": 8192, "rollout_max_context_len": 4090}, {}, None),
        ({"rollout_max_context_len": 4091}, {}, "use --rollout-max-context-len 4090"),
        ({}, {"eval_max_response_len": 4096}, "--eval-max-response-len 4096 leaves no token"),
        (
            {"rollout_max_context_len": 4090},
            {"eval_max_context_len": 9000, "eval_max_response_len": 10},
            "--eval-max-context-len 9000 is more than the 4090 tokens",
        ),
    ],
)
def test_lengths_that_every_engine_rejects_are_refused(rollout, evaluation, words) -> None:
    evaluation = {"eval_interval": 1, "eval_prompt_data": ["held", "held.jsonl"], **evaluation}
    config = load([], {"rollout": rollout, "eval": evaluation}).config
    problems = context_problems(config, MODEL)
    assert len(problems) == (words is not None) and all(words in line for line in problems)


def test_a_permitted_prompt_that_an_engine_may_reject_is_noted() -> None:
    rollout = {"rollout_max_response_len": 3000, "rollout_max_prompt_len": 1091}
    config = load([], {"rollout": rollout}).config
    (note,) = context_notes(config, MODEL)
    assert "a prompt of more than 1090 tokens is shortened, or rejected" in note
    fits = load([], {"rollout": {**rollout, "rollout_max_prompt_len": 1090}}).config
    assert not context_problems(config, MODEL) and not context_notes(fits, MODEL)


def sglang_function(
    file: str, name: str, constant: str = "", **scope: object
) -> Callable[..., Any]:
    """A function or method of SGLang's source and a constant that it reads, without the rest.

    ``scope``: other names that it reads.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    path = Path(spec.origin).parent / "srt" / file
    found: list[ast.stmt] = []
    for node in ast.walk(ast.parse(path.read_text())):
        is_constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant
        if is_constant or (isinstance(node, ast.FunctionDef) and node.name == name):
            found.append(node)
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


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
    of_sglang = sglang_function(
        "utils/hf_transformers/common.py", "get_context_length", "CONTEXT_LENGTH_KEYS"
    )
    hf = MODEL if scaling is None else {**MODEL, "rope_scaling": scaling}
    read = type("Read", (), hf)
    assert engine_context({}, hf) == of_sglang(read)
    given = load([], {"sglang": {"sglang_context_length": 1000}}).config
    assert engine_context(given.sglang.server_args, hf) == 1000


CONTEXT = 200


def answered_by_sglang(
    prompt: int, answer: int, *, pool: int = 1 << 20, page: int = 1, block: int = 0
) -> int:
    """Tokens of an answer that SGLang's scheduler permits; -1: it refuses the prompt."""
    worker = MagicMock()
    worker.model_config.context_len = CONTEXT
    worker.model_runner.effective_logical_max_total_num_tokens = pool
    worker.dllm_algorithm = SimpleNamespace(block_size=block) if block else None
    info = sglang_function(
        "managers/tp_worker.py",
        "get_worker_info",
        page_interleave_shard_size=lambda allocator: 1,
        get_schedule=MagicMock(),
    )(worker)
    max_req_len, max_req_input_len = info[4], info[5]
    request = MagicMock(origin_input_ids=[1] * prompt)
    request.sampling_params.max_new_tokens = answer
    request.sampling_params.min_new_tokens = 0
    scheduler = MagicMock(max_new_tokens_limit=None, max_req_len=max_req_len, page_size=page)
    scheduler.max_total_num_tokens, scheduler.kv_shard_widening = pool, 1
    of_memory = sglang_function("mem_cache/allocator/base.py", "max_new_tokens_for_memory")
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.max_new_tokens_for_memory = partial(of_memory, SimpleNamespace(page_size=page))
    sglang_function("managers/scheduler.py", "init_req_max_new_tokens")(scheduler, request)
    refuse = sglang_function(
        "managers/utils.py", "validate_input_length", Req=Any, Optional=Optional
    )
    refused = refuse(request, max_req_input_len, False)
    return -1 if refused else int(request.sampling_params.max_new_tokens)


def test_engines_serve_the_longest_request_in_full_and_no_check_lets_a_longer_one_pass() -> None:
    """By the functions of SGLang's own scheduler."""
    longest = longest_request({"context_length": CONTEXT}, {})
    assert longest == CONTEXT - UNREAD_TOKENS
    for prompt in (1, 100, longest - 1):
        assert answered_by_sglang(prompt, longest - prompt) == longest - prompt
        assert answered_by_sglang(prompt, CONTEXT - 1 - prompt) < CONTEXT - 1 - prompt
    assert answered_by_sglang(longest, 1) == -1


@pytest.mark.parametrize(
    ("args", "sizes", "longest"),
    [
        ({"max_total_tokens": 150}, {"pool": 150}, 144),
        ({"max_total_tokens": 190, "page_size": 32}, {"pool": 160, "page": 32}, 96),
        ({"max_total_tokens": CONTEXT + 1}, {"pool": CONTEXT + 1}, CONTEXT - UNREAD_TOKENS),
        ({"dllm_algorithm": "LowConfidence"}, {"block": 32}, CONTEXT - UNREAD_TOKENS - 32),
        (
            {"dllm_algorithm": "LowConfidence", "max_total_tokens": 150},
            {"pool": 150, "block": 32},
            150 - UNREAD_TOKENS - 32,
        ),
    ],
)
def test_the_kv_pool_and_blocks_of_diffusion_bound_a_request_as_sglang_does(
    args, sizes, longest
) -> None:
    hf = {"canvas_length": sizes["block"]} if "block" in sizes else {}
    assert longest_request({"context_length": CONTEXT, **args}, hf) == longest
    for prompt in (33, longest - 1):  # 33 tokens fill their last page least
        assert answered_by_sglang(prompt, longest - prompt, **sizes) == longest - prompt
    prompt = 33 if "page" in sizes else longest
    assert answered_by_sglang(prompt, longest + 1 - prompt, **sizes) != longest + 1 - prompt


def test_a_response_that_the_kv_pool_cannot_hold_is_refused_with_its_flag() -> None:
    groups = {"rollout": {"rollout_max_response_len": 3000}}
    config = load([], {**groups, "sglang": {"sglang_max_total_tokens": 2048}}).config
    (problem,) = context_problems(config, MODEL)
    assert "2042 tokens that engines serve in full of --sglang-max-total-tokens 2048" in problem
    assert not context_problems(load([], groups).config, MODEL), "its size is unknown"


def test_the_kv_pool_of_engines_without_gpus_is_that_of_their_defaults() -> None:
    """A request beyond it would be rejected, which ends the run."""
    longer = {"max_position_embeddings": 2 * POOL_WITHOUT_GPUS}

    def longest(has_gpus: bool, **sglang: object) -> int | None:
        config = with_pool(load([], {"sglang": sglang}).config, has_gpus=has_gpus)
        return longest_request(config.sglang.server_args, longer)

    assert longest(False) == POOL_WITHOUT_GPUS - UNREAD_TOKENS
    assert longest(True) == 2 * POOL_WITHOUT_GPUS - UNREAD_TOKENS
    given = {"sglang_max_total_tokens": 20_000}
    assert longest(False, **given) == longest(True, **given) == 20_000 - UNREAD_TOKENS
    groups = {
        "engines": {"held": {"engines": 1, "follows_policy": True}},
        "eval": {"eval_engines": "held", "eval_interval": 1, "eval_prompt_data": ["a", "b"]},
    }
    config = with_pool(load([], {**groups, "sglang": given}).config, has_gpus=False)
    assert pool_tokens(config.sglang.server_args) == POOL_WITHOUT_GPUS, "that of held"
    elsewhere = {"rollout_external_engine_addrs": ("host:1",)}
    assert longest(False, **elsewhere) == longest(True, **elsewhere)


def test_a_run_on_this_machine_is_refused_what_its_engines_cannot_hold(
    tmp_path, monkeypatch, capsys
) -> None:
    project = make_project(tmp_path / "project")
    config = project / "model/config.json"
    hf = json.loads(config.read_text()) | {"max_position_embeddings": 2 * POOL_WITHOUT_GPUS}
    config.write_text(json.dumps(hf))
    monkeypatch.chdir(project)
    words = ["submit", "recipe.toml", "--rollout-max-context-len", "20000"]
    monkeypatch.setattr("rlpost.cli.submit.read_local_gpus", list)
    assert main([*words, "--dry-run"]) == 0, "its engines run elsewhere"
    capsys.readouterr()
    assert main([*words, "--local"]) == 2
    assert "use --rollout-max-context-len 16378" in capsys.readouterr().err
    assert not (project / "runs").exists()


@pytest.mark.parametrize("given", [{}, {"sglang_max_total_tokens": 20_000}])
def test_engines_get_the_same_arguments_whether_or_not_the_driver_has_gpus(
    monkeypatch, given
) -> None:
    """They may run on other nodes; only requests are bounded by the pool of engines without."""
    config = load([], {"sglang": given}).config
    for name in ("Startup", "Observation", "HuggingFaceExport"):
        monkeypatch.setattr(run_stages, name, Mock())
    monkeypatch.setattr(run_stages, "read_config", lambda _: MODEL)
    monkeypatch.setattr(run_stages, "model_break_even", Mock())
    monkeypatch.setattr(RunStages, "__abstractmethods__", frozenset())
    pools, arguments = [], []
    for gpus in ([], [Mock()]):
        monkeypatch.setattr(run_stages, "read_local_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(run_stages, "Generation", generation := Mock())
        cluster = SimpleNamespace(attempt_dir="/run/attempts/1")
        stages = RunStages(config, cluster, checkpoints=Mock(), stop=Mock())  # type: ignore[abstract, arg-type]
        pools.append(pool_tokens(generation.call_args.args[0].sglang.server_args))
        arguments.append(server.engine_arguments(stages.config.sglang.server_args))
    assert arguments[0] == arguments[1]
    assert pools == ([20_000] * 2 if given else [POOL_WITHOUT_GPUS, None])
    (problem,) = context_problems(
        with_pool(
            load([], {"rollout": {"rollout_max_response_len": 30_000}}).config, has_gpus=False
        ),
        {"max_position_embeddings": 40_960},
    )
    assert "--sglang-max-total-tokens 16384 (the default without GPUs)" in problem


def test_adaptive_drafts_reserve_room_for_the_most_steps() -> None:
    sizes = {"speculative_eagle_topk": 1, "speculative_num_steps": 3}
    args = {"context_length": CONTEXT, "speculative_algorithm": "EAGLE", **sizes}
    assert longest_request({**args, "speculative_adaptive": True}, {}) == CONTEXT - 64


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [((None, None, None), 64), ((4, 3, 16), 16), ((8, 4, 8), 32), ((1, 1, 2), UNREAD_TOKENS)],
)
def test_room_for_drafts_is_no_room_for_a_request(sizes: tuple[int | None, ...], reserved) -> None:
    topk, steps, drafts = sizes
    args = {
        "context_length": CONTEXT,
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": topk,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": drafts,
    }
    assert longest_request(args, {}) == CONTEXT - reserved
    args["speculative_algorithm"] = "NGRAM"
    assert longest_request(args, {}) == CONTEXT - UNREAD_TOKENS


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
