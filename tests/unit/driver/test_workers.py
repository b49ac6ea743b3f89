"""The order in which workers receive calls, with fake workers that answer immediately."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.error_lines import error_line
from common.process_end import ProcessId
from rlpost.driver import workers
from rlpost.driver.placement import Slot
from rlpost.driver.workers import Stored, WorkerGroup
from rlpost.errors import TrainerDied, WorkerDied

NUM_WORKERS = 5


class Worker:
    """A fake worker that records the arguments of its calls."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.call = SimpleNamespace(remote=self._called)
        self.call_aside = SimpleNamespace(remote=self._called_aside)

    def _called_aside(self, method: str, *arguments: Any) -> asyncio.Future[int]:
        return self._called(method, {}, *arguments)

    def _called(self, method: str, keywords: Any, *arguments: Any) -> asyncio.Future[int]:
        self.heard.append(arguments)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        answer.set_result(len(self.heard))
        return answer


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """The workers of all groups that the test creates."""
    found: list[Worker] = []

    def remote(*arguments: Any) -> Worker:
        found.append(Worker())
        return found[-1]

    options = SimpleNamespace(options=lambda **named: SimpleNamespace(remote=remote))
    monkeypatch.setattr(workers.ray, "remote", lambda **named: lambda kind: options)
    monkeypatch.setattr(workers, "CALLS_AT_ONCE", 2)
    return found


def group(folder: Path) -> WorkerGroup:
    slots = [Slot("00" * 28, "10.0.0.1", 1)] * NUM_WORKERS
    names = [f"actor-{rank}" for rank in range(NUM_WORKERS)]
    return WorkerGroup(
        [object] * NUM_WORKERS, slots, names=names, log_dir=folder, envs=[{}] * NUM_WORKERS
    )


async def test_a_call_that_is_cancelled_while_it_is_submitted_reaches_every_worker(
    made: list[Worker], tmp_path: Path
) -> None:
    """A rank that missed a call would block in a collective that the others do not join."""
    actors = group(tmp_path)
    first = asyncio.ensure_future(actors.call("m", "first"))
    while not made[0].heard:
        await asyncio.sleep(0)
    assert not made[-1].heard, "the event loop ran before all calls were submitted"
    first.cancel()
    await actors.call("m", "second")
    assert [worker.heard for worker in made] == [[("first",), ("second",)]] * NUM_WORKERS


async def test_calls_made_together_reach_all_workers_in_one_order(
    made: list[Worker], tmp_path: Path
) -> None:
    actors = group(tmp_path)
    results = await asyncio.gather(
        actors.call("m", "a"), actors.call_aside("m", "b"), actors.call("m", "c")
    )
    assert [worker.heard for worker in made] == [[("a",), ("b",), ("c",)]] * NUM_WORKERS
    assert results == [[number] * NUM_WORKERS for number in (1, 2, 3)]


async def test_a_stored_argument_is_passed_to_ray_as_its_reference(
    made: list[Worker], tmp_path: Path
) -> None:
    """Ray resolves references that are arguments themselves, but not those nested in arguments."""
    await group(tmp_path).call_each("m", [(Stored("reference"), None)] * NUM_WORKERS)
    assert made[0].heard == [("reference", None)]


class Named:
    """A fake of Ray's named actors, as far as a later driver of an attempt needs them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: list[dict[str, Any]] = []
        self.killed: list[str] = []

        def made(**options: Any) -> SimpleNamespace:
            self.options.append(options)
            return SimpleNamespace(remote=lambda *arguments: Worker())

        remote = SimpleNamespace(options=made)
        monkeypatch.setattr(workers.ray, "remote", lambda **named: lambda kind: remote)
        monkeypatch.setattr(workers.ray.util, "list_named_actors", self.names)
        monkeypatch.setattr(workers.ray, "get_actor", self.get)
        monkeypatch.setattr(workers.ray, "kill", self.killed.append)

    def names(self) -> list[str]:
        return [*(options["name"] for options in self.options if "name" in options), "other"]

    def get(self, name: str) -> str:
        if name.startswith("engine-2"):
            raise ValueError("it has just ended")
        return name


def test_a_later_driver_finds_the_newest_worker_of_each_name_and_kills_older_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = Named(monkeypatch)
    group(tmp_path)
    assert named.names() == ["other"], "trainer ranks end with their driver"
    for names in (["engine-0", "engine-1"], ["engine-1", "engine-2"]):
        WorkerGroup(
            [object] * 2,
            [Slot("00" * 28, "10.0.0.1", 1)] * 2,
            names=names,
            log_dir=tmp_path,
            envs=[{}] * 2,
            outlive_driver=True,
        )
    assert {options.get("lifetime") for options in named.options[NUM_WORKERS:]} == {"detached"}
    found = workers.left_workers()
    assert sorted(found) == ["engine-0", "engine-1"]
    first, older, newer, _ = named.names()[:4]
    assert (found["engine-0"].handle, found["engine-1"].handle) == (first, newer)
    assert named.killed == [older]


def test_an_ended_process_is_dead_and_a_silent_one_is_not(
    made: list[Worker], tmp_path: Path
) -> None:
    def answers(state: str) -> SimpleNamespace:
        def remote() -> asyncio.Future[Any]:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if state == "dead":
                answer.set_exception(workers.ray.exceptions.ActorDiedError())
            if state == "alive":
                answer.set_result(ProcessId(1, 1))
            return answer

        return SimpleNamespace(remote=remote)

    async def run() -> list[int]:
        actors = group(tmp_path)
        states = ["alive", "dead", "silent", "alive", "dead"]
        for worker, state in zip(made, states, strict=True):
            worker.process = answers(state)  # type: ignore[attr-defined]
        return await actors.dead(0.1)

    assert asyncio.run(run()) == [1, 4]


@pytest.mark.parametrize("died", [WorkerDied, TrainerDied])
async def test_the_death_of_a_worker_is_raised_as_its_group_wants_it(
    made: list[Worker], tmp_path: Path, died: type[WorkerDied]
) -> None:
    actors = WorkerGroup(
        [object] * 2,
        [Slot("00" * 28, "10.0.0.1", 1)] * 2,
        names=["actor-0", "actor-1"],
        log_dir=tmp_path,
        envs=[{}] * 2,
        died=died,
    )

    def dies(*_: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(workers.ray.exceptions.ActorDiedError())
        return answer

    made[1].call = SimpleNamespace(remote=dies)
    with pytest.raises(died, match=r"actor-1 on 10\.0\.0\.1 died") as raised:
        await actors.call("train_step")
    assert (type(raised.value), raised.value.ranks) == (died, (1,))


RAY_WITHOUT_MEMORY = """\
2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.2, ID: a36a) was \
22.39GB used / 23.54GB limit
OOM kill reason: Memory usage 24022159360B exceeded threshold of 24012685312B (95.0% of 25276510208B limit)
Object store memory usage: [- objects spillable: 0
Total non-selected idle workers: 0
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
28925\t19.91\tpython train other.py
8627\t0.30\tray::_Worker
8754\t0.25\tpython -m rlpost.engines.server
7509\t0.14\tpython -m resources_servers.mcqa.app
Refer to the documentation on how to address the out of memory issue"""
"""Of Ray 2.60, shortened."""


async def test_a_worker_that_ray_kills_for_memory_dies_with_the_cause_in_one_line(
    made: list[Worker], tmp_path: Path
) -> None:
    def dies(*_: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(workers.ray.exceptions.OutOfMemoryError(RAY_WITHOUT_MEMORY))
        return answer

    actors = group(tmp_path)
    made[0].call = SimpleNamespace(remote=dies)
    with pytest.raises(WorkerDied) as raised:
        await actors.call("train_step")
    cause, *rest = str(raised.value).splitlines()
    assert cause.endswith(
        "the node had no memory left (22.39GB of 23.54GB were used), so Ray killed it; the largest processes: python "
        "train other.py (pid 28925) 19.91 GB, ray::_Worker (pid 8627) 0.30 GB, python -m rlpost.engines.server (pid "
        "8754) 0.25 GB"
    )
    log = f"12:00:00.100 INFO up\n12:00:01.000 ERROR {raised.value}"
    assert error_line(f"the driver ended with exit code 1; its last lines:\n{log}") == cause
    assert len(rest) <= workers.LOG_TAIL_LINES + 1


def test_a_group_uses_standbys_for_their_indices_and_creates_the_others(
    made: list[Worker], tmp_path: Path
) -> None:
    standbys = group(tmp_path)
    logs: list[str] = []
    made[3].log_to = SimpleNamespace(remote=logs.append)  # type: ignore[attr-defined]
    slots = [Slot("00" * 28, "10.0.0.1", 1)] * 2
    fresh = WorkerGroup(
        [object] * 2,
        slots,
        names=["actor-0", "actor-1"],
        log_dir=tmp_path,
        envs=[{}] * 2,
        standbys={1: standbys.standby(3)},
    )
    assert len(made) == NUM_WORKERS + 1, "only the first was created"
    assert logs == [str(tmp_path / "actor-1.log")]
    asyncio.run(fresh.call("m", "x"))
    assert made[3].heard == [("x",)]
