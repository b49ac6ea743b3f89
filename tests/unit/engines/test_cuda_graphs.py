"""Colocated engines release the memory of CUDA graphs; user settings win, conflicts are refused.

The last part checks the facts of the installed SGLang that this relies on. An upgrade that changes
a fact fails the test with its name.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlpost.cli.check_settings import check
from rlpost.config.load import load
from rlpost.config.server_arg_values import server_arg_table
from rlpost.engines import server
from rlpost.engines.cuda_graphs import (
    PREFILL,
    REGISTER,
    VARIABLE,
    GraphSettings,
    graph_problems,
    graph_settings,
)
from rlpost.errors import ConfigError

SAVER = {"enable_memory_saver": True}
DEFAULTS: dict[str, Any] = {
    "api_key": None,
    "enable_lora": False,
    "enable_return_routed_experts": False,
    "resolve_once": lambda: None,
}
"""Server arguments of SGLang that ``run_engine`` reads, with their defaults."""


def started_with(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return environment and ServerArgs with which an engine on CUDA launches SGLang."""
    import os

    import torch

    seen: dict[str, Any] = {}

    def launch(server_args: Any, **_: Any) -> None:
        given = {key: value for key, value in vars(server_args).items() if key not in DEFAULTS}
        seen.update(environment=dict(os.environ), server_args=given)

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    app = SimpleNamespace(add_middleware=lambda middleware: None)
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints"):
        module(name, __path__=[])
    module("sglang.srt.entrypoints.http_server", app=app, launch_server=launch)
    module("sglang.srt.plugins", load_plugins=lambda: None)
    module("sglang.srt.server_args", ServerArgs=partial(SimpleNamespace, **DEFAULTS))
    module("sglang.srt.utils", kill_process_tree=lambda pid, include_parent: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(os, "nice", lambda by: seen.update(niceness=by))
    monkeypatch.setattr(server, "typed_args", dict)
    monkeypatch.setattr(server, "prepared_processes", lambda secret: {})
    monkeypatch.setattr(os, "environ", os.environ.copy())
    server.run_engine(arguments, ready_fd=-1)
    always = {**server.DEFAULTS, **server.ON_CUDA}
    always |= {name: arguments[name] for name in always if name in arguments}
    assert {name: seen["server_args"].pop(name) for name in always} == always
    is_paused = bool(arguments.get("enable_memory_saver"))
    assert seen.get("niceness") == (server.PAUSED_NICENESS if is_paused else None)
    return seen["environment"], seen["server_args"]


def test_an_engine_that_offloads_captures_graphs_in_releasable_memory(monkeypatch):
    environment, server_args = started_with(monkeypatch, {**SAVER, "tp_size": 2})
    assert environment[VARIABLE] == "1" and environment[REGISTER] == "0"
    assert server_args == {**SAVER, "tp_size": 2, PREFILL: "disabled"}


def test_a_dtype_of_the_caller_is_kept(monkeypatch):
    started_with(monkeypatch, {"dtype": "float32"})


def test_an_engine_with_exclusive_gpus_is_not_changed(monkeypatch):
    environment, server_args = started_with(monkeypatch, {"tp_size": 2})
    assert not {VARIABLE, REGISTER} & set(environment) and server_args == {"tp_size": 2}


def test_a_user_who_turns_it_off_keeps_prefill_graphs(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    environment, server_args = started_with(monkeypatch, SAVER)
    assert environment[VARIABLE] == "0" and server_args == SAVER


@pytest.mark.parametrize(
    "given",
    [
        {PREFILL: "breakable"},
        {PREFILL: "tc_piecewise"},
        {"cuda_graph_backend_decode": "breakable"},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}, PREFILL: "disabled"},
        {"debug_cuda_graph": True},
    ],
)
def test_a_backend_of_the_users_whose_graphs_cannot_be_released_is_kept_with_its_memory(given):
    assert graph_settings(SAVER | given, {}) == GraphSettings()


@pytest.mark.parametrize(
    "given",
    [
        {PREFILL: "full"},
        {PREFILL: "disabled"},
        {"disable_prefill_cuda_graph": True},
        {"disable_cuda_graph": True},
        {"cuda_graph_config": {"prefill": {"backend": "full"}}, PREFILL: "breakable"},
    ],
)
def test_a_backend_of_the_users_whose_graphs_can_be_released_is_kept(given):
    made = graph_settings(SAVER | given, {})
    assert made.environment == {VARIABLE: "1", REGISTER: "0"} and not made.server_args


def test_sizes_alone_choose_no_backend():
    made = graph_settings(SAVER | {"cuda_graph_config": {"prefill": {"max_bs": 64}}}, {})
    assert made.server_args == {PREFILL: "disabled"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"sglang_" + PREFILL: "breakable"},
            ["--sglang-cuda-graph-backend-prefill breakable", "full or disabled"],
        ),
        (
            {"sglang_cuda_graph_backend_decode": "breakable"},
            ["--sglang-cuda-graph-backend-decode breakable"],
        ),
        ({"sglang_debug_cuda_graph": True}, ["--sglang-debug-cuda-graph"]),
    ],
)
def test_a_contradiction_is_refused_on_the_login_node(flags, words):
    environment = {VARIABLE: "1"}
    config = load(
        [], {"cluster": {"colocate": True, "environment": environment}, "sglang": flags}
    ).config
    with pytest.raises(ConfigError) as caught:
        check(config)
    (line,) = [line for line in str(caught.value).splitlines() if VARIABLE in line]
    assert all(word in line for word in words), line


def test_settings_that_do_not_conflict_are_accepted():
    prefill = {PREFILL: "breakable"}
    assert graph_problems(prefill, {}, offloads=True) == []
    assert graph_problems(prefill, {VARIABLE: "0"}, offloads=True) == []
    assert graph_problems(prefill, {VARIABLE: "1"}, offloads=False) == []
    assert graph_problems({PREFILL: "full"}, {VARIABLE: "1"}, offloads=True) == []


def test_a_value_that_sglang_reads_as_false_is_named():
    (problem,) = graph_problems({}, {VARIABLE: "yes"}, offloads=True)
    assert f"{VARIABLE}=yes" in problem and "use 1 or 0" in problem


# Facts of the installed SGLang
# ---------------------------------------------------------------------------------------

FOUND = importlib.util.find_spec("sglang")
SRT = (
    Path(FOUND.submodule_search_locations[0]) / "srt"
    if FOUND and FOUND.submodule_search_locations
    else None
)
BACKENDS = "model_executor/runner_backend"
needs_sglang = pytest.mark.skipif(SRT is None, reason="SGLang is not installed")


def source(path: str) -> ast.Module:
    assert SRT is not None
    return ast.parse((SRT / path).read_text())


def init_of(path: str, name: str) -> ast.FunctionDef:
    (made,) = [
        node for node in source(path).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return next(
        node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )


def takes_the_variable(function: ast.FunctionDef) -> bool:
    """Whether the memory saver is enabled by ``enable_memory_saver`` and the variable together."""
    conditions = [
        ast.unparse(keyword.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TorchMemorySaverAdapter.create"
        for keyword in node.keywords
        if keyword.arg == "enable"
    ]
    return conditions == [f"enable_memory_saver and get_bool_env_var('{VARIABLE}')"]


@needs_sglang
def test_fact_the_variable_is_off_by_default():
    assigned = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in ast.walk(source("environ.py"))
        if isinstance(node, ast.Assign) and VARIABLE in ast.unparse(node.targets[0])
    }
    assert assigned == {VARIABLE: "EnvBool(False)"}


@needs_sglang
def test_fact_full_graphs_are_in_releasable_memory_with_the_variable_alone():
    assert takes_the_variable(
        init_of(f"{BACKENDS}/full_cuda_graph_backend.py", "FullCudaGraphBackend")
    )


@needs_sglang
def test_fact_breakable_graphs_raise_with_the_variable():
    made = init_of(f"{BACKENDS}/breakable_cuda_graph_backend.py", "BreakableCudaGraphBackend")
    assert takes_the_variable(made)
    guards = [node for node in made.body if isinstance(node, ast.If)]
    raised = [
        ast.unparse(node) for guard in guards for node in guard.body if isinstance(node, ast.Raise)
    ]
    assert len(raised) == 1 and "NotImplementedError" in raised[0] and "memory saver" in raised[0]


@needs_sglang
def test_fact_prefill_is_breakable_on_cuda_by_default():
    functions = {
        node.name: ast.unparse(node)
        for node in source("model_executor/cuda_graph_config.py").body
        if isinstance(node, ast.FunctionDef)
    }
    assert "return Backend.BREAKABLE if is_cuda() else" in functions["default_prefill_backend"]


@needs_sglang
def test_fact_prefill_graphs_can_be_disabled_by_a_setting():
    assert PREFILL in server_arg_table().args
    annotations = [
        ast.unparse(node.annotation)
        for node in ast.walk(source("arg_groups/fields/exec_.py"))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == PREFILL
    ]
    assert len(annotations) == 1 and "'disabled'" in annotations[0]


@needs_sglang
def test_fact_the_tag_releases_what_the_memory_saver_holds():
    """``cuda_graph`` is the tag of the release and of the region that captures full graphs."""
    constants = ast.unparse(source("constants.py"))
    assert "GPU_MEMORY_TYPE_CUDA_GRAPH = 'cuda_graph'" in constants
    updater = ast.unparse(source("managers/scheduler_components/weight_updater.py"))
    assert "self.memory_saver_adapter.pause(GPU_MEMORY_TYPE_CUDA_GRAPH)" in updater
    backend = ast.unparse(source(f"{BACKENDS}/full_cuda_graph_backend.py"))
    assert "tag=GPU_MEMORY_TYPE_CUDA_GRAPH" in backend
