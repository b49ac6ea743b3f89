"""Invariant: the head uses the addresses of the established connections, always notices a stop
request, and names the hosts that are late.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.agent import gathering, head
from bootstrap.agent.head import HeadAgent
from bootstrap.agent.options import parse_options
from bootstrap.agent.rendezvous import BringupError, NodeReport
from bootstrap.agent.replacement import Replacements
from bootstrap.agent.verdict import AttemptVerdict, HostLoss, write_verdict
from bootstrap.links import link as link_module
from bootstrap.links.deadline import JobClock
from bootstrap.links.identity import Facts
from bootstrap.links.link import Link
from bootstrap.links.monitor import StopSignals
from bootstrap.network.detect import detect
from bootstrap.network.network_facts import Interface, NetworkFacts
from bootstrap.network.sockets import Address
from common.cluster import Cluster, Node
from common.message_codec import MessageCodec

HOSTS = ("n1", "n2", "n3")
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")


def agent_of(folder: Path, *options: str) -> HeadAgent:
    """The head of a job of three nodes, none of which has joined."""
    orders = parse_options([f"--attempt-dir={folder}", "--num-gpus=2", *options, "--", *SLEEPER])
    stop = StopSignals(folder, HOSTS[0], JobClock({}, lead_s=0.1), is_head=True)
    return HeadAgent(Facts(HOSTS[0], 0, HOSTS, "7", 0, in_slurm=True), orders, b"secret", stop)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(bounded())


async def test_a_driver_that_does_not_read_does_not_keep_the_head_from_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line about two thousand nodes does not fit into a pipe."""
    nodes = tuple(Node(f"n{number:04d}", f"10.0.0.{number}", "eth0", 8) for number in range(2000))

    async def brought_up(_: HeadAgent) -> Cluster:
        (tmp_path / "STOP").write_text("{}")
        return Cluster("10.0.0.1:1", str(tmp_path), nodes, 1, 1)

    monkeypatch.setattr(HeadAgent, "_bring_up", brought_up)
    monkeypatch.setattr("bootstrap.links.monitor._STOP_POLL_S", 0.05)
    verdict = await agent_of(tmp_path, "--stop-grace-s=0.1").run()
    assert verdict.verdict == "requeue" and "did not exit before its deadline" in verdict.cause


async def test_the_head_keeps_its_fabric_where_its_address_is_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A routed fabric without addresses on its links: the other nodes keep their settings, and NCCL
    needs those of all nodes.
    """
    lo = Interface("lo", "loopback", "up", ("127.0.0.1/8", "10.200.0.7/32"))
    facts = NetworkFacts((lo, Interface("eth0", driver="efa")))
    monkeypatch.setattr(head, "local_addresses", lambda: (Address("lo", "10.200.0.7"),))
    monkeypatch.setattr(
        head, "log_network_here", lambda _, ip: (facts, detect(facts, connection_ip=ip))
    )
    agent = agent_of(tmp_path)
    agent._gathering.begin()
    agent._reception.links[1] = SimpleNamespace(local_ip="10.200.0.7", peer_ip="10.200.0.8")  # type: ignore[assignment]
    agent._gathering.record_node(NodeReport("n2", 1, 2))
    own, fabric = await agent._report_own_node()
    assert (own.ip, own.ifname) == ("10.200.0.7", "lo")
    assert fabric == {"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"}
    agent._reception.links.clear()  # the others were spares
    monkeypatch.setattr(agent, "_bind_ip", lambda: "10.200.0.7")
    assert (await agent._report_own_node())[1] == {}


async def test_a_file_system_that_gives_up_is_not_taken_for_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nodes would be excluded because of it."""

    def gives_up(*_: object) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(head, "write_atomic", gives_up)
    monkeypatch.setattr(HeadAgent, "_prepare_ray", lambda _: asyncio.sleep(0))
    agent = agent_of(tmp_path)
    with pytest.raises(TimeoutError, match="Connection timed out"):
        await agent._bring_up()
    agent._reception.close()


class ConnectedNode:
    """A node whose agent has joined, at the other end of a link that beats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(link_module, "BEAT_S", 0.01)
        self._listener = socket.create_server(("127.0.0.1", 0))

    async def join(self, agent: HeadAgent) -> None:
        streams = await asyncio.open_connection(*self._listener.getsockname())
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(5.0)
        agent._reception.links[1] = Link(*streams, MessageCodec(b"key", "head"))
        agent._reception.links[1].start_beating()

    def hears_the_head(self) -> bool:
        """Whether heartbeats arrive; blocks the calling thread."""
        try:  # the first read returns what was sent before this call
            return all([self._connection.recv(65_536) for _ in range(3)])
        except TimeoutError:
            return False

    def close(self) -> None:
        self._connection.close()
        self._listener.close()


async def test_heartbeats_continue_while_the_write_of_the_head_file_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, heard = ConnectedNode(monkeypatch), []

    def hangs(path: Path, _: str) -> None:
        heard.append((path.name, node.hears_the_head()))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(head, "write_atomic", hangs)
    monkeypatch.setattr(HeadAgent, "_prepare_ray", lambda _: asyncio.sleep(0))
    agent = agent_of(tmp_path)
    await node.join(agent)
    with pytest.raises(OSError, match="Input/output error"):
        await agent._bring_up()
    agent._reception.links[1].close()
    agent._reception.close()
    node.close()
    assert heard == [("head.json", True)]


async def test_heartbeats_continue_while_the_write_of_the_verdict_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other nodes would report the head lost. No loss counts from then on."""
    node, heard = ConnectedNode(monkeypatch), []

    async def fails(_: HeadAgent) -> Cluster:
        raise BringupError("n3 did not join")

    def hangs(folder: Path, verdict: AttemptVerdict) -> None:
        heard.append(node.hears_the_head())
        write_verdict(folder, verdict)

    monkeypatch.setattr(HeadAgent, "_bring_up", fails)
    monkeypatch.setattr(head, "write_verdict", hangs)
    agent = agent_of(tmp_path)
    await node.join(agent)
    assert (await agent.run()).cause == "n3 did not join"
    node.close()
    assert heard == [True]
    assert (tmp_path / "verdict").read_text() == "failed\n"


async def test_heartbeats_continue_while_reads_of_logs_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the driver, and at the deadline of the bring-up."""
    node, heard = ConnectedNode(monkeypatch), []

    def hangs(*_: object) -> str:
        heard.append(node.hears_the_head())
        return "last words"

    for name in ("tail", "text_or_empty", "describe_missing"):
        monkeypatch.setattr(head, name, hangs)
    agent = agent_of(tmp_path)
    await node.join(agent)
    exited = asyncio.get_running_loop().create_future()
    exited.set_result(1)
    outcome = await agent._outcome_of_driver(SimpleNamespace(exited=exited))  # type: ignore[arg-type]
    assert (outcome.driver_code, outcome.driver_tail) == (1, "last words")
    assert "n3 of 3 nodes did not join" in str(await agent._too_late())
    agent._reception.links[1].close()
    node.close()
    assert heard == [True] * 3


async def test_a_node_that_is_lost_while_the_verdict_is_written_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement would write the list of excluded hosts, which is part of the verdict."""
    taken: list[str] = []
    lost = threading.Event()

    async def fails(_: HeadAgent) -> Cluster:
        raise BringupError("n3 did not join")

    monkeypatch.setattr(HeadAgent, "_bring_up", fails)
    monkeypatch.setattr(Replacements, "take", lambda _, host, loss: taken.append(host))
    loop, agent = asyncio.get_running_loop(), agent_of(tmp_path, "--spare-nodes=1")

    def lose_a_node() -> None:
        agent._gathering.used = HOSTS[:2]
        agent._on_node_end("n2", HostLoss("n2 is gone"))
        lost.set()

    def hangs(folder: Path, verdict: AttemptVerdict) -> None:
        loop.call_soon_threadsafe(lose_a_node)
        assert lost.wait(10)
        write_verdict(folder, verdict)

    monkeypatch.setattr(head, "write_verdict", hangs)
    await agent.run()
    assert taken == []


async def test_a_verdict_is_complete_even_if_the_head_is_cancelled_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def fails(_: HeadAgent) -> Cluster:
        raise BringupError("n3 did not join", exclude=["n3"])

    def slow(folder: Path, verdict: AttemptVerdict) -> None:
        begun.set()
        cancelled.wait(10)
        write_verdict(folder, verdict)

    monkeypatch.setattr(HeadAgent, "_bring_up", fails)
    monkeypatch.setattr(head, "write_verdict", slow)
    running = asyncio.create_task(agent_of(tmp_path).run())
    while not begun.is_set():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    cancelled.set()
    # Like the agent's event loop, whose end waits for its threads.
    await asyncio.get_running_loop().shutdown_default_executor()
    assert (tmp_path / "exclude").read_text() == "n3\n"
    assert (tmp_path / "verdict").read_text() == "failed\n"


async def test_nodes_that_extract_their_image_for_long_are_named_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gathering, "REPORT_S", 0.05)
    caplog.set_level("INFO")
    agent = agent_of(tmp_path)
    reporting = asyncio.create_task(agent._gathering.report_missing())
    while "waiting for n2, n3 (1 of 3 joined)" not in caplog.text:
        await asyncio.sleep(0.01)
    agent._reception.links[1] = SimpleNamespace()  # type: ignore[assignment]
    while "waiting for n3 (2 of 3 joined)" not in caplog.text:
        await asyncio.sleep(0.01)
    agent._reception.links[2] = SimpleNamespace()  # type: ignore[assignment]
    await reporting


async def test_who_is_late_is_named(tmp_path: Path) -> None:
    agent = agent_of(tmp_path, "--bringup-deadline-s=5")
    assert "n2, n3 of 3 nodes did not join within 5 s" in str(await agent._too_late())
    for rank, host in enumerate(HOSTS[1:], start=1):
        agent._reception.links[rank] = SimpleNamespace()  # type: ignore[assignment]
        agent._reception.reports[rank] = NodeReport(host, rank, 2, ip=f"10.0.0.{rank}")
    assert "Ray did not come up within 5 s on:\nn1: " in str(await agent._too_late())
    agent._ray = SimpleNamespace(registered={"10.0.0.9": 2})  # type: ignore[assignment]
    assert "preflight did not finish within 5 s" in str(await agent._too_late())
    agent._gathering.used = HOSTS
    agent._ray.registered["10.0.0.1"] = 2
    assert "Ray did not come up within 5 s on:\nn3: " in str(await agent._too_late())


@pytest.mark.parametrize(
    ("is_taken", "is_stopping", "is_lost"),
    [(True, False, False), (False, False, True), (True, True, True)],
    ids=["a spare replaces it", "no spare", "a stop was requested"],
)
async def test_a_lost_node_ends_the_attempt_unless_a_spare_replaces_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_taken: bool,
    is_stopping: bool,
    is_lost: bool,
) -> None:
    """Also a node whose machine is up and whose Ray ended."""
    monkeypatch.setattr(Replacements, "take", lambda *_: is_taken)
    agent = agent_of(tmp_path, "--spare-nodes=1")
    agent._gathering.used = HOSTS[:2]
    if is_stopping:
        agent._stop.requested.set()
    messages = iter([{"kind": "lost", "cause": "Ray ended by itself"}])

    async def receive() -> dict[str, Any]:
        return next(messages, None) or await asyncio.Event().wait()

    link = SimpleNamespace(receive=receive)
    following = asyncio.create_task(agent._follow(NodeReport("n2", 1, 2), link))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    assert agent._lost.done() is is_lost
    if is_lost:
        assert agent._lost.result().cause == "n2: Ray ended by itself"
    following.cancel()


async def test_hosts_that_spares_have_replaced_are_excluded_whatever_the_verdict(
    tmp_path: Path,
) -> None:
    agent = agent_of(tmp_path, "--spare-nodes=1")
    agent._replacements._excluded.append("n2")
    verdict = agent._with_excluded(AttemptVerdict("failed", "n3 is gone", ("n3",)))
    assert verdict.exclude == ("n2", "n3")
