"""Invariant: a node lost in the middle of a run is replaced by a spare, or the attempt ends as it
would without spares; always exactly one of both.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bootstrap.agent import replacement
from bootstrap.agent.rendezvous import NodeReport
from bootstrap.agent.replacement import Decision, Replacements, choose_spare
from bootstrap.agent.verdict import HostLoss
from bootstrap.links.link import LinkLost
from common.cluster import Cluster, Node
from common.lost_nodes import LostNode, read_lost_nodes, write_lost_nodes, write_replaceable

HOSTS = ("n1", "n2", "n3", "n4")
ORDER = {"kind": "start_ray", "head_ip": "10.0.0.1", "port_base": 20_000}
KILLED = HostLoss("n2 is gone: the connection was closed")
SILENT = HostLoss("n2 is gone: its machine does not answer", ("n2",))


def test_the_first_spare_replaces_a_node_that_the_driver_can_lose() -> None:
    assert choose_spare("n2", ("n3", "n4"), {"n2"}) == Decision("n3")
    assert choose_spare("n2", (), {"n2"}).why == "no spare node is left"
    assert choose_spare("n2", ("n3",), ()).why == "the driver cannot continue without n2"


def report(rank: int) -> NodeReport:
    return NodeReport(HOSTS[rank], rank, 2, {"ray": "1"}, f"10.0.0.{rank + 1}", "eth0")


class FakeLink:
    """A connection to an agent that records messages."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.sent: list[str] = []
        self.is_closed = False
        self._is_broken = is_broken

    async def send(self, message: dict[str, Any]) -> None:
        if self._is_broken:
            raise LinkLost("nothing is acknowledged")
        self.sent.append(message["kind"])

    def close(self) -> None:
        self.is_closed = True


class FakeGathering:
    """Two hosts are used, two are spares."""

    def __init__(self, spares: tuple[str, ...]) -> None:
        self.spares, self.used = spares, HOSTS[:2]

    def take_spare(self, host: str) -> None:
        self.spares = tuple(spare for spare in self.spares if spare != host)

    def replace(self, lost: str, host: str) -> None:
        self.used = tuple(host if each == lost else each for each in self.used)


class FakeRay:
    """Registers only the given addresses."""

    def __init__(self, *joining: str) -> None:
        self.joining = joining

    async def wait_registered(self, wanted: dict[str, int]) -> None:
        if not wanted.keys() <= set(self.joining):
            await asyncio.Event().wait()


class Scene:
    """The head of a cluster of n1 and n2, with the spares n3 and n4."""

    def __init__(
        self, folder: Path, *, ray: FakeRay, spares: tuple[str, ...] = HOSTS[2:], **broken: bool
    ) -> None:
        self.folder = folder
        self.gathering = FakeGathering(spares)
        self.links = {
            rank: FakeLink(is_broken=broken.get(HOSTS[rank], False)) for rank in (1, 2, 3)
        }
        reports = {rank: report(rank) for rank in (1, 2, 3)}
        reception = type("Reception", (), {"links": self.links, "reports": reports})()
        self.given_up: list[HostLoss] = []
        nodes = tuple(Node(host, f"10.0.0.{i + 1}", "eth0", 2) for i, host in enumerate(HOSTS[:2]))
        cluster = Cluster("10.0.0.1:20001", str(folder), nodes, 20_600, 400)
        self.replacements = Replacements(
            folder,
            self.gathering,  # type: ignore[arg-type]
            reception,
            give_up=self.given_up.append,
        )
        self.clusters: list[Cluster] = []
        self.replacements.set_driver_cluster = self.clusters.append
        self.replacements.begin(cluster, report(0), ray, ORDER)  # type: ignore[arg-type]

    async def settled(self) -> None:
        while self.replacements.unsettled is not None:
            await asyncio.sleep(0.01)

    @property
    def states(self) -> list[tuple[str, str, str]]:
        """Host, state and replacement, as the driver reads them."""
        return [
            (lost.host, lost.state, lost.replacement.host if lost.replacement else "")
            for lost in read_lost_nodes(self.folder)
        ]


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


async def test_a_spare_takes_the_place_and_the_driver_is_told(tmp_path: Path) -> None:
    write_replaceable(tmp_path, ["n2"])
    head = Scene(tmp_path, ray=FakeRay("10.0.0.3"))
    assert head.replacements.take("n2", KILLED)
    assert head.replacements.unsettled == KILLED
    await head.settled()
    assert head.states == [("n2", "replaced", "n3")]
    assert head.gathering.used == ("n1", "n3")
    assert [node.host for node in head.clusters[-1].nodes] == ["n1", "n3"]
    assert head.links[2].sent == ["start_ray"]
    assert head.links[1].sent == ["end"] and head.links[1].is_closed
    assert head.given_up == [] and head.replacements.excluded == ()
    assert not (tmp_path / "exclude").exists()


async def test_a_machine_that_does_not_answer_is_excluded_from_the_next_attempt(
    tmp_path: Path,
) -> None:
    write_replaceable(tmp_path, ["n2"])
    head = Scene(tmp_path, ray=FakeRay("10.0.0.3"), n2=True)
    head.replacements.take("n2", SILENT)
    await head.settled()
    (lost,) = read_lost_nodes(tmp_path)
    assert lost.state == "replaced"
    assert head.replacements.excluded == ("n2",)
    assert (tmp_path / "exclude").read_text() == "n2\n"


@pytest.mark.parametrize("fails", ["too late", "its agent ends", "its link is broken"])
async def test_a_spare_that_fails_during_the_join_is_followed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    write_replaceable(tmp_path, ["n2"])
    if fails == "too late":
        monkeypatch.setattr(replacement, "JOIN_S", 0.2)
    head = Scene(tmp_path, ray=FakeRay("10.0.0.4"), n3=fails == "its link is broken")
    head.replacements.take("n2", KILLED)
    if fails == "its agent ends":
        while "start_ray" not in head.links[2].sent:
            await asyncio.sleep(0.01)
        head.replacements.give_up_spare("n3", "the connection was closed")
    await head.settled()
    assert head.states == [("n2", "replaced", "n4")]
    assert head.given_up == []


async def test_the_attempt_ends_when_every_spare_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_replaceable(tmp_path, ["n2"])
    monkeypatch.setattr(replacement, "JOIN_S", 0.1)
    head = Scene(tmp_path, ray=FakeRay())
    head.replacements.take("n2", SILENT)
    await head.settled()
    assert head.states == [("n2", "given up", "")]
    (loss,) = head.given_up
    assert loss.cause == f"{SILENT.cause}; no spare node is left" and loss.exclude == ("n2",)


async def test_two_nodes_that_are_lost_together_get_different_spares(tmp_path: Path) -> None:
    """The second is lost while the first spare joins; a third loss ends the attempt."""
    write_replaceable(tmp_path, ["n2", "n3"])
    head = Scene(tmp_path, ray=FakeRay("10.0.0.3", "10.0.0.4"))
    head.replacements.take("n2", KILLED)
    await head.settled()
    write_replaceable(tmp_path, ["n3"])  # by the driver, once n3 is in use
    assert head.replacements.take("n3", HostLoss("n3 is gone"))
    await head.settled()
    assert [state for _, state, _ in head.states] == ["replaced", "replaced"]
    assert head.gathering.used == ("n1", "n4")
    assert not head.replacements.take("n4", HostLoss("n4 is gone"))


async def test_a_node_that_the_driver_needs_ends_the_attempt_and_no_spare_is_used_up(
    tmp_path: Path,
) -> None:
    """Before the engines are up, and where the driver has its trainer ranks."""
    head = Scene(tmp_path, ray=FakeRay("10.0.0.3"))
    head.replacements.take("n2", KILLED)
    await head.settled()
    assert head.given_up[0].cause.endswith("the driver cannot continue without n2")
    assert head.states == [] and head.gathering.spares == ("n3", "n4")


async def test_a_replacement_that_is_cancelled_writes_nothing_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its list of excluded hosts must not replace that of the verdict."""
    write_replaceable(tmp_path, ["n2"])
    began, resume = threading.Event(), threading.Event()

    def slow(folder: Path, lost: list[LostNode]) -> None:
        began.set()
        resume.wait(10)
        write_lost_nodes(folder, lost)

    monkeypatch.setattr(replacement, "write_lost_nodes", slow)
    head = Scene(tmp_path, ray=FakeRay("10.0.0.3"))
    head.replacements.take("n2", SILENT)
    while not began.is_set():
        await asyncio.sleep(0.01)
    ending = asyncio.create_task(head.replacements.end())
    await asyncio.sleep(0.05)
    assert not ending.done()
    resume.set()
    await ending
    assert head.states == [("n2", "joining", "")]
    assert (tmp_path / "exclude").read_text() == "n2\n"
    assert head.replacements.unsettled is None and head.links[2].sent == []


async def test_without_spares_a_loss_is_refused_at_once(tmp_path: Path) -> None:
    assert not Scene(tmp_path, ray=FakeRay(), spares=()).replacements.take("n2", KILLED)
