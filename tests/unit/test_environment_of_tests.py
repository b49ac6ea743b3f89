"""Tests do not disturb the next one in their process, or those of other processes on the machine."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port, free_ports

FOLDER = Path(__file__).parent / "leaking"


def test_changes_of_a_test_and_of_a_module_are_undone_when_they_end():
    """In a separate session, because the modules must run in one process, one after the other."""
    files = [str(FOLDER / name) for name in ("changing.py", "later.py")]
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    given = os.environ | {"LEAK_GIVEN": "given", "LEAK_REMOVED": "given"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], env=given, capture_output=True, text=True
    )
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


def test_processes_draw_different_ports_while_they_live():
    """Four draw at the same time, and nothing listens at their ports yet."""
    draw = "from tests.ports import free_ports; print(*free_ports(300), flush=True); input()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", draw],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=FOLDER.parents[2],
        )
        for _ in range(4)
    ]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout]
        drawn = [int(port) for line in lines for port in line.split()]
        drawn += free_ports(100)
        assert len(set(drawn)) == len(drawn) == 1300
    finally:
        for process in processes:
            process.kill()  # which unlocks its ports
            process.communicate()
    assert {free_port() for _ in range(10_000)} & set(drawn[:1200])


def test_a_session_of_ray_that_a_test_process_starts_has_no_token():
    """A token stays in the memory of the process (``tests.ray_sessions``), whatever is restored."""
    texts = {path: path.read_text() for path in FOLDER.parents[1].rglob("*.py")}
    functions = [
        (path.name, node, ast.unparse(node))
        for path, text in texts.items()
        if "ray.init(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    starts = [(name, text) for name, node, text in functions if _calls(node, "ray.init")]
    assert {name for name, _ in starts} == {"test_send.py", "conftest.py"}
    for name, text in starts:
        assert 0 <= text.find("disable_authentication()") < text.find("ray.init("), name


def _calls(function: ast.AST, called: str) -> bool:
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == called
        for node in ast.walk(function)
    )
