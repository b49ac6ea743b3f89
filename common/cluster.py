"""Description of the Ray cluster, which an agent sends to the driver on its standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common.attempt import SECRET_FILE, STOP_FILE


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the allocation, as seen by the rendezvous."""

    host: str
    ip: str
    ifname: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running Ray cluster. The agent writes it as one JSON line to the driver's standard input.

    ``ray_address`` is ``IP:PORT`` of the head; ``nodes[0]`` is the head; ``port_base`` starts the
    block of ``port_count`` TCP ports that this job may use for its own services on every node.
    ``incarnation`` counts the drivers of the attempt from 0. Later ones replace a driver that died
    ``died_at`` (seconds since 1970) for the reason ``died_of``, and adopt the engines it left.
    """

    ray_address: str
    attempt_dir: str
    nodes: tuple[Node, ...]
    port_base: int
    port_count: int
    incarnation: int = 0
    died_at: float = 0.0
    died_of: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        raw = json.loads(text)
        raw["nodes"] = tuple(Node(**node) for node in raw["nodes"])
        return cls(**raw)

    def with_replacement(self, host: str, node: Node) -> Cluster:
        """Return the cluster with ``node`` in place of ``host``."""
        nodes = tuple(node if each.host == host else each for each in self.nodes)
        return replace(self, nodes=nodes)

    @property
    def driver_name(self) -> str:
        """Name of this driver of the run: its attempt, and its number among later drivers of it.

        >>> Cluster("", "/run/attempts/3", (), 0, 0, incarnation=1).driver_name
        '3.1'
        """
        attempt = Path(self.attempt_dir).name
        return f"{attempt}.{self.incarnation}" if self.incarnation else attempt

    @property
    def stop_file(self) -> Path:
        return Path(self.attempt_dir) / STOP_FILE

    @property
    def secret(self) -> str:
        return (Path(self.attempt_dir) / SECRET_FILE).read_text().strip()
