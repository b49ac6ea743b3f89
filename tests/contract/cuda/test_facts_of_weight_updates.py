"""Facts of the installed SGLang and torch that weight updates rely on; each test names its fact.

On a machine without a GPU, only these tests fail when an upgrade changes such a fact.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from rlpost.config.load import load
from rlpost.orchestration.weight_coordinator import nccl_environment

CUMEM = "NCCL_CUMEM_ENABLE"


def source_of_sglang(path: str) -> str:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations, "SGLang is not installed"
    return (Path(found.submodule_search_locations[0]) / "srt" / path).read_text()


@cache
def statement_that_sets_cumem() -> ast.If:
    """Find ``if "NCCL_CUMEM_ENABLE" not in os.environ or ...`` in ``_set_envs_and_config``."""
    module = ast.parse(source_of_sglang("entrypoints/engine.py"))
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    (function,) = [one for one in functions if one.name == "_set_envs_and_config"]
    tests = [
        one for one in function.body if isinstance(one, ast.If) and CUMEM in ast.unparse(one.test)
    ]
    assert len(tests) == 1, f"SGLang decides {CUMEM} in {len(tests)} places of _set_envs_and_config"
    return tests[0]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("given", [{}, {CUMEM: "0"}, {CUMEM: "1"}])
def test_sglang_sets_nccl_cumem_enable_as_the_trainer_does(
    symmetric: bool, given: dict[str, str]
) -> None:
    """Run SGLang's own statement with our environment and settings."""
    environ = dict(given)
    names = {
        "os": SimpleNamespace(environ=environ),
        "cfg": SimpleNamespace(enable_symm_mem=symmetric),
    }
    statement = ast.fix_missing_locations(ast.Module([statement_that_sets_cumem()], []))
    exec(compile(statement, "sglang", "exec"), names)
    config = load([], {"sglang": {"sglang_enable_symm_mem": True} if symmetric else {}}).config
    assert environ == nccl_environment(config, given)


def test_torch_aborts_a_group_without_waiting_for_it() -> None:
    """``destroy_process_group`` calls ``shutdown``, which on NCCL first flushes work in flight."""
    aborting = inspect.getsource(distributed_c10d._abort_process_group)
    assert "pg.abort()" in aborting and "shutdown" not in aborting
    assert "pg.shutdown()" in inspect.getsource(distributed_c10d.destroy_process_group)


def test_torch_reads_its_watchdogs_switch_when_a_group_is_made() -> None:
    """The header has the variable's name and the member, but not the constructor that reads it."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = (headers / "ProcessGroupNCCL.hpp").read_text()
    assert '"TORCH_NCCL_BLOCKING_WAIT"' in text
    assert "bool blockingWait_ = false;" in text
