"""Rules for all tests.

- A test in tests/cluster, tests/e2e or tests/gpu has the marker of that name.
- A test that cannot run here skips with a reason. In CI (``CI=true``) that is a failure, unless it
  needs a GPU.
- A coroutine test runs in a separate event loop, for at most ``COROUTINE_S`` seconds.
- ``os.environ`` is restored after each test, and after each module, whose fixtures may change it.
- ``--update-golden`` rewrites the files of tests/golden instead of comparing with them.
- ``--kills`` and ``--hostile-commands`` are the sizes of two tests with random actions
  (tests/e2e/test_fleet.py, tests/contract/test_hostile_commands.py), and ``--draw`` is their seed.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.environment import restored_environment
from tests.left_descriptors import left_descriptors, open_descriptors
from tests.rare_collections import collect_rarely

# Otherwise each of thousands of processes compiles the project's modules, and each worker the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of torch spin while they wait for each other, here and in every process that a test starts.
# Must be set before torch is imported. Not on a host with GPUs, where tests measure CPU work.
if shutil.which("nvidia-smi") is None:
    for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_variable, "1")

# As the product starts Ray (bootstrap/agent/ray_command.py). Ray's default for its workers is 15, at
# which they hardly run beside other busy processes of the session.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name in Ray

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("cluster", "e2e", "gpu")
# Tests of these folders and files wait more than they compute: at most half of the workers run them,
# while there are others.
WAITING = ("cluster", "unit/slurm", "unit/cli", "unit/watching", "unit/test_gpu_check.py")
# The longest file first, and of a folder those of TOGETHER, which one worker runs as one file. Short
# files come last, so that the workers end at about the same time.
ORDER = ("e2e/test_slurm.py", *WAITING, "e2e", "contract")
# Folders whose files run in one worker, in the order of their names: they share servers that take
# long to start, or what a long process has observed.
TOGETHER = ("contract/engines", "contract/forked", "contract/cuda/observed", "contract/in_ray")

settings.register_profile("any machine", deadline=None)  # a slow machine is not a failure
settings.register_profile(  # for make mutants, where most runs fail: no search for the least example
    "mutants",
    deadline=None,
    derandomize=True,
    max_examples=25,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile("any machine")


COROUTINE_S = 120.0

collect_rarely()  # for the imports of the tests


def pytest_collection_finish(session: pytest.Session) -> None:
    collect_rarely()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden"
    )
    parser.addoption(
        "--slurm", help="Debian release whose Slurm the tests with the marker every_slurm use"
    )
    parser.addoption(
        "--on-demand", action="store_true", help="run the tests with the marker on_demand too"
    )
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        help="kills of a run: the signal of a preemption, agent, node, then all 6 places",
    )
    parser.addoption(
        "--hostile-commands", type=int, default=60, help="commands that attack the sandboxes"
    )
    parser.addoption("--draw", type=int, help="seed of --kills and --hostile-commands")


def pytest_configure(config: pytest.Config) -> None:
    # by default pytest-xdist starts with the files that have most tests
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--on-demand"):
        left_out = [item for item in items if item.get_closest_marker("on_demand")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
    items.sort(key=lambda item: _place(item.path.relative_to(TESTS)))


@cache
def _place(path: Path) -> tuple[int, bool, str]:
    place = next(
        (place for place, start in enumerate(ORDER) if path.is_relative_to(start)), len(ORDER)
    )
    folder = _together(path)
    return place, folder is None, str(path) if folder else ""


def _waits(scope: str) -> bool:
    """Whether the tests of a scope, a path from the project's root, wait more than they compute."""
    return scope.startswith(tuple(f"tests/{start}" for start in WAITING))


def _together(path: Path) -> str | None:
    """The folder of ``TOGETHER`` that contains a file; both are relative to tests/."""
    return next((folder for folder in TOGETHER if path.is_relative_to(folder)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, distribute a folder of ``TOGETHER`` like one file, and keep tests
    that wait beside others that compute.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _together((config.rootpath / file).relative_to(TESTS)) or file

        def _assign_work_unit(self, node: Any) -> None:
            pending = {
                worker: {scope for scope, done in work.items() if not all(done.values())}
                for worker, work in self.assigned_work.items()
                if worker is not node
            }
            num_waiting = sum(any(map(_waits, scopes)) for scopes in pending.values())
            others = [scope for scope in self.workqueue if not _waits(scope)]
            if others and num_waiting >= len(self.nodes) // 2:
                self.workqueue.move_to_end(others[0], last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    in_ci = os.environ.get("CI", "").lower() == "true"
    if (
        in_ci
        and report.skipped
        and not hasattr(report, "wasxfail")
        and item.get_closest_marker("gpu") is None
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not skip in CI: {reason}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), COROUTINE_S))
    return True


@pytest.fixture(scope="module", autouse=True)
def environment_of_module() -> Iterator[None]:
    """Restore what a module's own fixtures change, for the next module of this worker."""
    with restored_environment():
        yield


@pytest.fixture(autouse=True)
def environment_of_test(environment_of_module: None) -> Iterator[None]:
    """Restore what a test changes, and the code that it calls; not what fixtures of its module do."""
    with restored_environment():
        yield


IN_PROCESS = ("unit", "golden")


@pytest.fixture(autouse=True)
def no_stack_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the check with transformers, a process of a second, to tests that are about it."""
    place = request.path.relative_to(TESTS).parts
    if place[0] in IN_PROCESS and place[-1] != "test_stack_check.py":
        monkeypatch.setattr("rlpost.cli.stack_check._has_model", lambda config: False)


@pytest.fixture(autouse=True)
def no_passed_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat each check: a record in this user's cache folder must not replace one."""
    if request.path.relative_to(TESTS).parts[0] in IN_PROCESS:
        folder = Path(os.devnull) / "no_folder"
        monkeypatch.setattr("rlpost.tasks.passed_checks.cache_folder", lambda: folder)


@pytest.fixture(scope="module", autouse=True)
def few_descriptors_are_left() -> Iterator[None]:
    """Fail a file whose tests leave more than MOST_LEFT sockets, pipes or event loops open."""
    before = open_descriptors()
    yield
    left = left_descriptors(before)
    assert not left, f"the tests of this file leave {len(left)} descriptors open: {left}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares the text with the whole file tests/golden/NAME."""

    def compare(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), (
            f"{path} is missing; look at the text, then run pytest --update-golden"
        )
        assert text == path.read_text(), (
            f"differs from {path}; if the change is meant, run pytest --update-golden"
        )

    return compare
