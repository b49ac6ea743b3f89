"""Rendezvous of the agents: the head listens, every other node connects and authenticates.

Input: facts, the attempt's secret, a deadline. Output: one ``Link`` and one ``NodeReport`` per
node.

Invariants: a peer that cannot prove that it holds the secret receives no byte and changes no state.
The address of the established connection is used for everything else. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import math
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bootstrap.agent.early_exits import with_likely_cause
from bootstrap.agent.verdict import Word
from bootstrap.links.link import Link, LinkLost
from bootstrap.network.sockets import Address
from common.cluster import Node
from common.files import tail
from common.message_codec import MessageCodec, hello_key, new_nonce, session_key

logger = logging.getLogger(__name__)

HEAD_FILE = "head.json"
_HANDSHAKE_S = 10.0
_RETRY_S = 0.05
_RESOLVE_EVERY_S = 2.0  # bounds the load of waiting nodes on the name service
_RESOLVE_S = 5.0  # timeout of a name lookup, after which the known addresses are tried
_STAGGER_S = 0.5  # delay before the next candidate is tried in parallel
_PREFERENCE_S = 0.1  # an earlier candidate that answers this much later still wins

_NUM_DIGEST_CHARS = 8
_METADATA = (".dist-info", ".egg-info")

# Errors of connecting to an address where the head is not, or not yet, listening.
_NOT_THE_HEAD = (OSError, LinkLost, TimeoutError, ValueError, KeyError)


class BringupError(Exception):
    """The bring-up failed; the message names the missing or mismatched hosts.

    ``verdict`` is the verdict of the attempt, ``exclude`` the hosts to exclude from the next one.
    """

    def __init__(
        self, cause: str, *, verdict: Word = "failed", exclude: Sequence[str] = ()
    ) -> None:
        super().__init__(cause)
        self.verdict: Word = verdict
        self.exclude = tuple(exclude)


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's description of itself, sent when it joins."""

    host: str
    rank: int
    num_gpus: int
    versions: Mapping[str, str | None] = field(default_factory=dict)
    ip: str = ""  # local address of the connection
    ifname: str = ""
    host_facts: Mapping[str, Any] = field(default_factory=dict)  # of preflight.HostFacts
    network: Mapping[str, str] = field(default_factory=dict)  # a row of the comparison

    @property
    def node(self) -> Node:
        """The node as the driver sees it."""
        return Node(self.host, self.ip, self.ifname, self.num_gpus)


@functools.cache
def installed_versions() -> Mapping[str, str | None]:
    """Versions that must be equal on all nodes; None: not installed. Read once."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("ray", "torch", "sglang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["packages"] = package_fingerprint()
    return found


def package_fingerprint(folders: Iterable[str] | None = None) -> str:
    """Hexadecimal digest of every ``NAME-VERSION`` on the import path, independent of its order.

    Names and versions are those of the folders of distributions; no file is read. The image's own
    digest is not visible from inside the image.
    """
    found: set[str] = set()
    for folder in sys.path if folders is None else folders:
        try:
            found.update(name for name in os.listdir(folder or ".") if name.endswith(_METADATA))
        except OSError:  # archives and missing folders
            continue
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:_NUM_DIGEST_CHARS]


def odd_versions(reports: Sequence[NodeReport]) -> dict[str, list[str]]:
    """Hosts that differ from the majority, with the differences."""
    odd: dict[str, list[str]] = {}
    for name in sorted({name for report in reports for name in report.versions}):
        counts = Counter(report.versions.get(name) for report in reports)
        usual = counts.most_common(1)[0][0]
        for report in reports:
            if report.versions.get(name) != usual:
                odd.setdefault(report.host, []).append(
                    f"{name} {report.versions.get(name)}, the others {usual}"
                )
    return odd


def check_versions(reports: Sequence[NodeReport]) -> None:
    """Raise BringupError with each version that differs from the majority's."""
    if odd := odd_versions(reports):
        listed = "; ".join(
            f"{host} has {what}" for host, differences in odd.items() for what in differences
        )
        raise BringupError(
            f"{listed}: use the same environment or image on every node", verdict="config"
        )


class Reception:
    """The head's side: accepts nodes until every expected one has joined."""

    def __init__(
        self, secret: bytes, hosts: Sequence[str], on_joined: Callable[[NodeReport, Link], None]
    ) -> None:
        self._secret = secret
        self._hosts = hosts
        self._on_joined = on_joined
        self.links: dict[int, Link] = {}
        self.reports: dict[int, NodeReport] = {}
        self.joined_at: dict[int, float] = {}  # seconds of the epoch, by the head's clock
        self.complete = asyncio.Event()
        self._server: asyncio.Server | None = None
        if len(hosts) == 1:
            self.complete.set()

    async def open(self, listener: socket.socket) -> None:
        """Start to accept connections on a bound socket."""
        self._server = await asyncio.start_server(
            self._on_connection, sock=listener, backlog=len(self._hosts) + 16
        )

    def close(self) -> None:
        """Stop accepting connections; existing links stay open."""
        if self._server is not None:
            self._server.close()

    def missing(self) -> list[str]:
        """Hosts that have not joined."""
        return [
            host for rank, host in enumerate(self._hosts) if rank != 0 and rank not in self.links
        ]

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = Link(reader, writer, MessageCodec(hello_key(self._secret), "head"))
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                report = await self._admit(link)
        except (LinkLost, TimeoutError, ValueError, TypeError, KeyError) as error:
            logger.warning(
                "rejected a connection from %s: %s", link.peer_ip, error or type(error).__name__
            )
            link.close()
            return
        self.links[report.rank], self.reports[report.rank] = link, report
        self.joined_at[report.rank] = time.time()
        link.start_beating()
        logger.info("%s joined from %s (%s)", report.host, report.ip, report.ifname)
        self._on_joined(report, link)
        if len(self.links) == len(self._hosts) - 1:
            self.complete.set()

    async def _admit(self, link: Link) -> NodeReport:
        hello = await link.receive()
        nonce = new_nonce()
        await link.send({"kind": "welcome", "echo": hello["nonce"], "nonce": nonce})
        link.codec.rekey(session_key(self._secret, hello["nonce"], nonce))
        joined = await link.receive()  # proves that the hello was not a replay
        try:
            return self._check_report(joined["report"], link.peer_ip)
        except (ValueError, TypeError, KeyError) as error:
            # or the node would consider the head dead
            await link.send({"kind": "refused", "cause": str(error)})
            raise

    def _check_report(self, said: Mapping[str, Any], peer_ip: str) -> NodeReport:
        report = NodeReport(**said)
        if not (0 < report.rank < len(self._hosts)) or report.rank in self.links:
            raise ValueError(
                f"{report.host} claims rank {report.rank}, which is taken or does not exist"
            )
        if report.ip != peer_ip:
            raise ValueError(
                f"{report.host} reports address {report.ip} but connected from {peer_ip}: address translation "
                "between nodes is not supported; choose another network with --socket-ifname"
            )
        return report


async def join(
    describe: Callable[[Link], NodeReport],
    *,
    secret: bytes,
    candidates: Callable[[], Sequence[tuple[str, int]]],
    source_ip: str | None = None,
) -> Link:
    """Connect a node to the head: try all candidate addresses until one authenticates.

    ``describe`` returns the report for an established connection. ``candidates`` is called in each
    round, because the head publishes its addresses at any time. Never times out; the caller sets
    the deadline.
    """
    resolver = _Resolver()
    while True:
        places = [
            place for host, port in candidates() for place in await resolver.places(host, port)
        ]
        link = await _first_to_answer(list(dict.fromkeys(places)), secret, source_ip)
        if link is not None:
            await link.send({"kind": "joined", "report": asdict(describe(link))})
            link.start_beating()
            return link
        await asyncio.sleep(_RETRY_S)


def head_document(port: int, addresses: Sequence[Address]) -> str:
    """Content of ``HEAD_FILE``: the addresses and the port where the head listens."""
    return json.dumps({"port": port, "addresses": [address.ip for address in addresses]}) + "\n"


def head_candidates(head_host: str, port: int, head_file: Path) -> list[tuple[str, int]]:
    """Addresses at which a node tries to reach the head.

    First its name, at ``port`` and at the published port, because all nodes share that network;
    then the published addresses.
    """
    hosts, published_port = [], port
    with suppress(OSError, ValueError):  # the head has not published its addresses yet
        document = json.loads(head_file.read_text())
        hosts, published_port = document["addresses"], document["port"]
    published = [(host, published_port) for host in (head_host, *hosts)]
    return list(dict.fromkeys([(head_host, port), *published]))


def describe_missing(missing: Sequence[str], attempt_dir: Path, log_name: str) -> str:
    """The missing hosts, each with the end of its log; ``log_name`` contains HOST."""
    logs = {host: tail(attempt_dir / log_name.replace("HOST", host), 8) for host in missing}
    return "\n".join(f"{host}: {with_likely_cause(log)}" for host, log in logs.items())


class _Resolver:
    """Resolves host names, IPv4 before IPv6, with a short-lived cache."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def places(self, host: str, port: int) -> list[tuple[str, int]]:
        """Addresses of a host; empty until resolved.

        A hanging name service does not delay other hosts.
        """
        asked_at, _ = self._known.get(host, (-math.inf, []))
        if (
            host not in self._asking
            and asyncio.get_running_loop().time() - asked_at > _RESOLVE_EVERY_S
        ):
            self._asking[host] = asyncio.create_task(self._ask(host, port))
            await asyncio.wait([self._asking[host]], timeout=_RESOLVE_S)
        return [(ip, port) for ip in self._known.get(host, (0.0, []))[1]]

    async def _ask(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            found = []
        families = (socket.AF_INET, socket.AF_INET6)
        ips = [
            str(sockaddr[0])
            for wanted in families
            for family, *_, sockaddr in found
            if family == wanted
        ]
        self._known[host] = (loop.time(), ips)
        del self._asking[host]


async def _until_answer_or_failures(
    attempts: Sequence[asyncio.Task[Link]], silence_s: float | None
) -> None:
    """Return when an attempt has succeeded, all have failed, or none has ended for ``silence_s``."""
    while not _answer(attempts):
        waiting = [task for task in attempts if not task.done()]
        if not waiting:
            return
        ended, _ = await asyncio.wait(
            waiting, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not ended:  # silent: the next address is tried, and these may still answer
            return


async def _first_to_answer(
    places: Sequence[tuple[str, int]], secret: bytes, source_ip: str | None
) -> Link | None:
    """Link to the first address that authenticates as the head; the other attempts are cancelled.

    Earlier addresses are preferred (RFC 8305): the next one is tried when all before it have failed
    or are silent. If several answer almost at once, for example after a stall of the head, all
    nodes choose the same network.
    """
    attempts: list[asyncio.Task[Link]] = []
    for index, (ip, port) in enumerate(places):
        attempts.append(asyncio.create_task(_connect(ip, port, secret, source_ip)))
        timeout_s = None if index == len(places) - 1 else _STAGGER_S
        await _until_answer_or_failures(attempts, timeout_s)
        if _answer(attempts):
            break
    if answered := _answer(attempts):
        earlier = [task for task in attempts[: attempts.index(answered[0])] if not task.done()]
        if earlier:
            await asyncio.wait(earlier, timeout=_PREFERENCE_S)
    link = next((task.result() for task in _answer(attempts)), None)
    for task in attempts:
        task.cancel()
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(outcome, Link) and outcome is not link:
            outcome.close()
        elif isinstance(outcome, Exception) and not isinstance(outcome, _NOT_THE_HEAD):
            raise outcome
    return link


def _answer(attempts: Sequence[asyncio.Task[Link]]) -> list[asyncio.Task[Link]]:
    return [task for task in attempts if task.done() and task.exception() is None]


async def _connect(ip: str, port: int, secret: bytes, source_ip: str | None) -> Link:
    async with asyncio.timeout(_HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(
            ip, port, local_addr=(source_ip, 0) if source_ip else None
        )
        link = Link(reader, writer, MessageCodec(hello_key(secret), "node"))
        try:
            nonce = new_nonce()
            await link.send({"kind": "hello", "nonce": nonce})
            welcome = await link.receive()
            if welcome["echo"] != nonce:
                raise LinkLost("the welcome is a replay of an older one")
        except BaseException:
            link.close()
            raise
        link.codec.rekey(session_key(secret, nonce, welcome["nonce"]))
        return link
