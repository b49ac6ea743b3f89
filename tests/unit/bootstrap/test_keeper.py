"""Invariant: no process that a keeper started is left when the keeper, the command or the agent has
ended.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bootstrap.links.monitor import Kept

# A tree of three, each in a session of its own and deaf to TERM; every process leaves its pid in
# the folder.
STUBBORN_TREE = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1])
for _ in range(2):
    if os.fork() != 0:
        break
    os.setsid()
(folder / f"pid-{os.getpid()}").touch()
time.sleep(600)
"""


# The keeper with less time between TERM and KILL when its agent is gone.
IMPATIENT_KEEPER = """
import sys
from bootstrap.agent import keeper
keeper._ORPHANED_GRACE_S = 0.2
keeper.main(sys.argv[1:])
"""
REPOSITORY = Path(__file__).parents[3]


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(bounded())


async def keep(*command: str, scratch: Sequence[str] = ()) -> Kept:
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        return await Kept.start(
            "test", command, environ=os.environ, stdio=(nothing, nothing), scratch=scratch
        )
    finally:
        os.close(nothing)


async def tree_in(folder: Path, num_processes: int = 3) -> list[psutil.Process]:
    while len(found := list(folder.glob("pid-*"))) < num_processes:
        await asyncio.sleep(0.02)
    return [psutil.Process(int(path.name.removeprefix("pid-"))) for path in found]


async def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether all end. A process that has ended and that init has not reaped counts as ended
    (pidfd_open(2)).
    """
    return all(
        await asyncio.gather(*(asyncio.to_thread(_is_gone, process.pid) for process in processes))
    )


def _is_gone(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waits = select.poll()  # select(2) takes no descriptor above 1023
        waits.register(descriptor, select.POLLIN)
        return bool(waits.poll(20_000))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("command", "code"), [(["sh", "-c", "exit 7"], 7), (["sh", "-c", "kill -9 $$"], -9)]
)
async def test_the_exit_code_is_passed_on(command: list[str], code: int) -> None:
    kept = await keep(*command)
    assert await kept.exited == code
    await kept.gone
    kept.release()


async def test_a_command_that_does_not_exist_ends_with_127() -> None:
    kept = await keep("/no/such/command")
    assert await kept.exited == 127
    kept.release()


async def test_a_kept_command_stands_outside_the_agents_process_tree(tmp_path: Path) -> None:
    """Slurm's proctrack/linuxproc finds only the agent by parent ids below the task."""
    kept = await keep(sys.executable, "-c", STUBBORN_TREE, str(tmp_path))
    processes = await tree_in(tmp_path)
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    assert not below & {process.pid for process in processes}
    await kept.end(0.1)
    kept.release()


async def test_what_ignores_term_is_killed_with_all_its_daemons(tmp_path: Path) -> None:
    kept = await keep(sys.executable, "-c", STUBBORN_TREE, str(tmp_path))
    processes = await tree_in(tmp_path)
    await kept.end(0.2)
    assert kept.gone.done() and await kept.exited == -signal.SIGKILL
    assert await all_gone(processes)
    kept.release()


async def test_daemons_do_not_outlive_their_command() -> None:
    kept = await keep("sh", "-c", "setsid sleep 600 & exit 3")
    assert await kept.exited == 3
    await kept.gone
    kept.release()


def test_when_the_agent_is_killed_everything_ends_and_the_scratch_folder_goes(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "impatient_keeper.py").write_text(IMPATIENT_KEEPER)
    agent = f"""
import asyncio, os, sys
from bootstrap.links import monitor as supervise
supervise._KEEPER = "impatient_keeper"
async def main():
    command = [sys.executable, "-c", {STUBBORN_TREE!r}, {str(tmp_path)!r}]
    environ = dict(os.environ, PYTHONPATH={f"{tmp_path}:{REPOSITORY}"!r})
    await supervise.Kept.start("test", command, environ=environ, stdio=(0, 1), scratch=[{str(scratch)!r}])
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", agent], stdin=subprocess.DEVNULL)

    async def scene() -> None:
        processes = await tree_in(tmp_path)
        (keeper,) = {
            parent
            for child in processes
            for parent in child.parents()
            if "impatient_keeper" in parent.cmdline()
        }
        process.kill()
        assert await all_gone([*processes, keeper])
        assert not scratch.exists()

    run(scene)
    process.wait()


async def test_when_the_keeper_is_killed_the_agent_ends_the_rest(tmp_path: Path) -> None:
    kept = await keep("sh", "-c", f"sleep 600 & touch {tmp_path}/pid-$! {tmp_path}/pid-$$; wait")
    processes = await tree_in(tmp_path, 2)
    keeper = next(
        parent for parent in processes[0].parents() if "bootstrap.agent.keeper" in parent.cmdline()
    )
    keeper.kill()
    assert await kept.exited == -signal.SIGKILL
    assert await all_gone(processes)
    kept.release()
