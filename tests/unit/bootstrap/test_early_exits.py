"""Invariant: a node whose task failed before it joined is reported within seconds, with the end of
its log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bootstrap.agent import early_exits
from bootstrap.agent.early_exits import failures_before_joining
from bootstrap.agent.node import NodeAgent
from bootstrap.agent.options import parse_options
from bootstrap.agent.rendezvous import BringupError
from bootstrap.links.deadline import JobClock
from bootstrap.links.identity import Facts
from bootstrap.links.monitor import StopSignals
from tests.unit.bootstrap.test_head import HOSTS, agent_of

EXIT_1 = "Exited with exit code 1"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_exits, "POLL_S", 0.01)
    monkeypatch.setattr(early_exits, "SETTLE_S", 0.05)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(bounded())


def fails(folder: Path, hosts: str, tasks: str, *, words: str = "broken image\n") -> None:
    """Files that srun and the hosts write."""
    for host in HOSTS:
        (folder / f"agent-{host}.log").write_text(words)
    with (folder / "launch.log").open("a") as file:
        file.write(f"srun: error: {hosts}: {tasks}: {EXIT_1}\n")


async def test_each_missing_host_is_told_once_and_one_that_joined_never(tmp_path: Path) -> None:
    missing = ["n2", "n3"]
    told = failures_before_joining(tmp_path, HOSTS, lambda: missing)
    fails(tmp_path, "n2", "task 1")
    first = await anext(told)
    assert list(first) == ["n2"] and EXIT_1 in first["n2"] and "broken image" in first["n2"]
    missing.remove("n3")
    fails(tmp_path, "n3", "task 2")
    missing.remove("n2")
    assert [later async for later in told] == []


@pytest.mark.parametrize(("options", "is_lost"), [((), True), (("--spare-nodes=1",), False)])
async def test_a_node_that_fails_before_it_joins_ends_the_attempt_unless_a_spare_is_there(
    tmp_path: Path, options: tuple[str, ...], is_lost: bool
) -> None:
    """No process waits for it any longer."""
    agent = agent_of(tmp_path, *options)
    fails(tmp_path, "n3", "task 2")
    watching = asyncio.create_task(agent._watch_launch())
    if is_lost:
        loss = await agent._lost
        assert loss.exclude == ("n3",)
        assert (
            loss.cause.startswith(f"n3 failed before it joined: {EXIT_1}")
            and "broken image" in loss.cause
        )
    else:
        while not agent._gathering._absent_hosts().get("n3", "").startswith("n3 failed"):
            await asyncio.sleep(0.01)
        assert not agent._lost.done()
    watching.cancel()


async def test_all_nodes_but_the_head_speak_against_none_of_them(tmp_path: Path) -> None:
    agent = agent_of(tmp_path)
    fails(tmp_path, "n[2-3]", "tasks 1-2")
    watching = asyncio.create_task(agent._watch_launch())
    loss = await agent._lost
    assert loss.exclude == () and "n2 failed" in loss.cause and "n3 failed" in loss.cause
    watching.cancel()


async def test_a_lost_spare_is_not_waited_for(tmp_path: Path) -> None:
    """Both needed nodes have joined; the spare would have ten more seconds."""
    gathering = agent_of(tmp_path, "--spare-nodes=1", "--spare-wait-s=600")._gathering
    gathering._fit.add("n2")
    gathering._reception.links[1] = object()  # type: ignore[assignment]
    waiting = asyncio.create_task(gathering.wait())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert gathering.record_loss("n3", "its container fails")
    async with asyncio.timeout(30):
        await waiting


async def test_a_head_that_fails_before_its_agent_is_told_by_another_node(tmp_path: Path) -> None:
    """Without that verdict the nodes would try to reach the head until the deadline."""
    fails(tmp_path, "n1", "task 0", words="ModuleNotFoundError: No module named 'psutil'\n")
    orders = parse_options([f"--attempt-dir={tmp_path}", "--num-gpus=2", "--", "true"])
    stop = StopSignals(tmp_path, "n2", JobClock({}, lead_s=0.1), is_head=False)
    node = NodeAgent(Facts("n2", 1, HOSTS, "7", 0, in_slurm=True), orders, b"secret", stop)
    with pytest.raises(BringupError, match="n1 failed before it joined"):
        node._candidates()
    assert (tmp_path / "verdict").read_text() == "failed\n"
    assert (tmp_path / "exclude").read_text() == "n1\n"
    assert "psutil" in json.loads((tmp_path / "verdict.json").read_text())["cause"]
