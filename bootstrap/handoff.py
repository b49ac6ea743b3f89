"""Interface between the batch script, the agents and the driver: attempt files, exit codes, cluster description.

This is the only module of ``bootstrap`` that the trainer imports; stdlib only. An attempt is one start of a job in
``RUN/attempts/K``, where K is the first unused number from the Slurm restart count upwards.

    STOP           stop request, written by the first process that learns that the run must end (JSON: reason, time of
                   the signal, deadline; times in seconds since 1970); the driver polls it
    secret         created by the batch script (or by a single local agent), mode 0600; authenticates agents, Ray and
                   engines
    verdict        one word for the batch script: done | requeue | failed | config
    verdict.json   the verdict with its cause, for the user
    exclude        hosts to exclude from the next start, one per line; only if there are any
    preflight.json checks of every host and their results
    launch.log     output of srun, preceded by that of the image import
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
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: the state is committed; requeue
EXIT_CONFIG = 78  # EX_CONFIG: a restart cannot help


def is_there(path: Path) -> bool:
    """Whether a file exists that another host may just have written. Blocks while the storage hangs.

    An NFS client caches "no such file" for up to acdirmax (60 s). Opening the folder makes the client revalidate the
    folder with the server (Linux, fs/nfs/dir.c, nfs_lookup_verify_inode) and drop that entry if the folder changed.
    """
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return os.path.exists(path)  # Path.exists raises ESTALE and EIO


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
