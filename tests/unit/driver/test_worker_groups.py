"""Calls of workers name methods by the methods themselves; the driver loads no training stack.

``tests/contract/test_types.py`` has the type checker compare methods and arguments.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpost.driver.worker_groups import Actor, Engine, Workers, remote
from rlpost.driver.workers import Stored

ROOT = Path(__file__).parents[3]
WITH_STRINGS = {"call", "call_each", "call_each_stored", "call_aside", "answers_aside"}


def test_the_driver_loads_neither_torch_nor_megatron() -> None:
    """It would start 3 seconds later, with 300 MB more, for the names of its ranks' methods."""
    code = "import sys, rlpost.driver.driver, rlpost.driver.stages, rlpost.driver.debug_modes\n"
    code += "print({'torch', 'megatron', 'transformers'} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "none\n", done.stdout + done.stderr


def test_a_call_has_the_path_of_its_method() -> None:
    paths = [remote(Actor.has_gpu), remote(Engine.stop), remote(Actor.stop_points.hold)]
    assert [call.path for call in paths] == ["has_gpu", "stop", "stop_points.hold"]


def test_a_function_of_this_process_is_no_method_of_a_worker() -> None:
    with pytest.raises(TypeError, match="is not the method of a worker"):
        remote(len, [])


def test_a_stored_value_is_no_keyword() -> None:
    """Ray hands a worker the value of a positional argument, but the reference in a keyword."""
    stored: Any = Stored(None)
    with pytest.raises(TypeError, match="save: pass step as a positional argument"):
        remote(Actor.save, "folder", step=stored)


@pytest.mark.parametrize("send", ["aside", "each_stored", "answers"])
async def test_a_keyword_is_not_lost(send: str) -> None:
    workers: Any = None
    call: Any = remote(Actor.save, "folder", 1, in_background=True)
    argument = [call] if send == "each_stored" else call
    with pytest.raises(TypeError, match="save: keywords are for"):
        await getattr(Workers(workers), send)(
            argument, **({"within_s": 1.0} if send == "answers" else {})
        )


@pytest.mark.parametrize("send", ["each", "each_stored"])
async def test_workers_get_calls_of_one_method_alone(send: str) -> None:
    """They wait for each other in collectives."""
    workers: Any = None
    calls: Any = [remote(Actor.export, "a"), remote(Actor.export_critic, "a")]
    with pytest.raises(TypeError, match="export: workers get different methods"):
        await getattr(Workers(workers), send)(calls)


def test_no_other_module_calls_a_worker_by_name() -> None:
    """Editors cannot follow such calls, and type checkers do not notice a renamed method."""
    by_name = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "rlpost").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WITH_STRINGS
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    assert not by_name
