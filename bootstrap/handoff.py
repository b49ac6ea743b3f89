"""What the batch script, the agents and the driver agree on: files of an attempt, exit codes, the cluster's shape.

This is the only module of ``bootstrap`` that the trainer imports; stdlib only. An attempt is one start of a job:
``RUN/attempts/K`` with K the first number from the Slurm restart count on that no start has used.

    STOP           written by whoever first learns that the run must end soon (JSON: reason, time of the signal,
                   deadline, both in seconds since 1970); the driver polls it
    secret         made by the batch script (or by a single local agent), 0600; authenticates agents, Ray and engines
    verdict        one word for the batch script: done | requeue | failed | config
    verdict.json   the same with its cause, for people
    exclude        hosts that the next start must not get, one a line; only when there are any
    preflight.json what was checked on every host and what came of it
    launch.log     what srun said of the step, and what the import of the image said before it
    agent-HOST.log, driver.log
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

STOP_FILE = "STOP"
SECRET_FILE = "secret"
VERDICT_FILE = "verdict"
VERDICT_JSON = "verdict.json"
EXCLUDE_FILE = "exclude"
PREFLIGHT_JSON = "preflight.json"
DRIVER_LOG = "driver.log"
LAUNCH_LOG = "launch.log"

EXIT_DONE = 0
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: everything consistent is committed, start me again
EXIT_CONFIG = 78  # EX_CONFIG: starting again cannot help


def is_there(path: Path) -> bool:
    """Whether a file exists that another host may just have written. May wait for as long as the storage hangs.

    A client of NFS answers "no such file" from its cache for up to acdirmax (60 s). Opening the folder makes it ask
    the server whether the folder has changed (Linux, fs/nfs/dir.c, nfs_lookup_verify_inode), and then forget that.
    """
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return os.path.exists(path)  # Path.exists raises ESTALE and EIO


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the allocation as the rendezvous saw it."""

    host: str
    ip: str
    ifname: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster that is up. The agent writes it as one JSON line to the driver's standard input.

    ``ray_address`` is ``IP:PORT`` of the head; ``nodes[0]`` is the head; ``port_base`` starts the block of
    ``port_count`` TCP ports that this job may use for its own services on every node.
    """

    ray_address: str
    attempt_dir: str
    nodes: tuple[Node, ...]
    port_base: int
    port_count: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        raw = json.loads(text)
        raw["nodes"] = tuple(Node(**node) for node in raw["nodes"])
        return cls(**raw)

    @property
    def stop_file(self) -> Path:
        return Path(self.attempt_dir) / STOP_FILE

    @property
    def secret(self) -> str:
        return (Path(self.attempt_dir) / SECRET_FILE).read_text().strip()
