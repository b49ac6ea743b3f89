"""A node that another user shares: what listens, what is written, and what the stranger reaches.

``Node`` has its own network, /tmp and /dev/shm, so that all ports and paths in it belong to the run.
Each must be declared here: a new one fails tests/e2e/test_shared_node.py until its entry says who may
reach it. The stranger, another uid in the same namespaces, has taken the predictable names before
the run starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.port_blocks import BLOCK_SIZE, PortBlock
from tests.e2e.runs import ROOT
from tests.processes import living

STRANGER_UID = 65534
SEEN_AS = Path("/mnt")
HOLDS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that every user can write to."""
BASES = [Path(folder).resolve() for folder in (ROOT, sys.prefix, sys.base_prefix)]
PROGRAMS = ("unshare", "nsenter", "ip", "ss")
WHY_NOT = "needs root, to run a process as another user" if os.geteuid() else ""
if not WHY_NOT and (missing := [name for name in PROGRAMS if shutil.which(name) is None]):
    WHY_NOT = f"needs {', '.join(missing)} (util-linux, iproute2)"

NEXT_PIDS = 40_000
"""Process ids whose folders the stranger takes; more than Linux has by default."""

# argv: the folder of the test, then folders that must stay where they are below /tmp
SETUP = f"""
set -e
mount --make-rprivate /
mount --bind "$1" {SEEN_AS}; shift
mount --bind /tmp /media
for folder in {" ".join(HOLDS)}; do mount -t tmpfs -o mode=1777 tmpfs $folder; done
for folder in "$@"; do mkdir -p $folder; mount --bind /media/${{folder#/tmp/}} $folder; done
umount /media
ip link set lo up
mkdir -m 777 /tmp/torchinductor_root /tmp/ray /tmp/rlpost-jit-0
# The folders of the next agents: of the next process ids, also after the largest one. Other tests
# take ids at the same time, 4,000 of them in the minute until the agent starts.
{{ seq -f /tmp/rl%.0f.0 $$ $(($$ + {NEXT_PIDS})); seq -f /tmp/rl%.0f.0 300 {NEXT_PIDS}; }} |
    sort -u | xargs mkdir -p -m 755
find /tmp -maxdepth 1 -name 'rl*' | xargs chown {STRANGER_UID}:{STRANGER_UID}
chown {STRANGER_UID}:{STRANGER_UID} /tmp/torchinductor_root /tmp/ray
echo ready
exec sleep 100000
"""

# What the stranger tries, as JSON: {"ports": [[host, port]], "paths": [path], "pids": [pid]}.
# Modules are imported as root, because the interpreter may lie where others cannot read.
STRANGER = """
import json, os, signal, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
import torch.distributed as dist
given = json.loads(sys.argv[1])
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
OPEN = 7
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

def tried(act):
    try:
        return act()
    except Exception as error:
        return None

def store(host, port):
    client = dist.TCPStore(host, port, None, False, timedelta(seconds=2), wait_for_workers=False)
    client.set("stranger", "was here")
    return [key for key in client.list_keys()]

def page(host, port, path, method):
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    try:
        with opener.open(request, timeout=3) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

def pages(host, port):
    answered = []
    for method, path in given["pages"]:
        status = tried(lambda: page(host, port, path, method))
        if status is None:
            break  # no HTTP
        if status < 400:
            answered.append(path)
    return answered

result = {"stores": [], "pages": {}, "paths": [], "environ": []}
children = {}
for host, port in given["ports"]:  # a process each: a silent server holds a client of a store forever
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        os._exit(OPEN if tried(lambda: store(host, port)) is not None else 0)
    children[pid] = port
for pid, port in children.items():
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == OPEN:
        result["stores"].append(port)
with ThreadPoolExecutor(40) as pool:
    for (host, port), answered in zip(given["ports"], pool.map(pages, *zip(*given["ports"]))):
        result["pages"][f"{host}:{port}"] = answered
for path in given["paths"]:
    if tried(lambda: os.listdir(path) if os.path.isdir(path) else open(path).close() or []) is not None:
        result["paths"].append(path)
for pid in given["pids"]:
    if tried(lambda: open(f"/proc/{pid}/environ").read(1)):
        result["environ"].append(pid)
print(json.dumps(result))
"""
PAGES = [
    *(("GET", path) for path in ("/", "/metrics", "/health", "/liveness", "/readiness")),
    *(("GET", path) for path in ("/v1/models", "/get_server_info", "/server_info", "/workers")),
    *(("GET", path) for path in ("/api/version", "/api/jobs/", "/logs", "/nodes?view=summary")),
    *(("POST", path) for path in ("/generate", "/flush_cache", "/update_weights_from_disk")),
]

KINDS = {
    r"^/.*gcs_server": "gcs",
    r"^/.*raylet/raylet": "raylet",
    r"dashboard/dashboard\.py|^ray-dashboard": "dashboard",
    r"^ray::DashboardAgent": "dashboard agent",
    r"^ray::RuntimeEnvAgent": "runtime env",
    r"^ray::": "worker",
    r"^sglang::scheduler": "scheduler",
    r"bootstrap\.agent ": "agent",
    r"rlpost\.train": "driver",
    r"rlpost\.engines\.server": "engine",
}
ANY, NODE, LOOPBACK = "any", "node", "loopback"
WORKERS = range(PortBlock(0).worker_ports.start, PortBlock(0).worker_ports.stop)
GLOO = range(BLOCK_SIZE, 65536)  # ports of the kernel's choice

DECLARED: dict[tuple[str, str], tuple[range | int, ...]] = {
    # authenticated frames; after the bring-up no connection is accepted
    ("agent", NODE): (0,),
    # gRPC, which requires the token
    ("gcs", ANY): (1,),
    ("raylet", ANY): (4, 5),
    ("worker", ANY): (WORKERS,),
    ("driver", ANY): (WORKERS,),
    ("dashboard agent", ANY): (7,),
    # HTTP, which requires the token
    ("runtime env", NODE): (6,),
    ("dashboard agent", NODE): (8,),
    ("dashboard agent", LOOPBACK): (8,),
    ("dashboard", LOOPBACK): (2,),
    # HTTP of two engines, which requires the key
    ("engine", NODE): (600, 602),
    ("driver", LOOPBACK): (999,),
    # metrics without names of anything but the model: counts of Ray's dashboard
    ("dashboard", ANY): (11,),
    # the stores of the trainer's ranks, and of the trainer with the engines: authenticated
    ("worker", NODE): (604, 605),
    # gloo, between ranks on the loopback: SECURITY.md
    ("worker", LOOPBACK): (GLOO,),
    ("scheduler", LOOPBACK): (GLOO,),
}
"""Who listens, where, on which offsets from the first port of the block."""
OPEN_PAGES: dict[tuple[str, str], set[str]] = {
    ("engine", NODE): {"/health"},
    ("dashboard", LOOPBACK): {"/"},  # the page without data
    ("dashboard", ANY): {path for method, path in PAGES if method == "GET"},
}
"""What is answered without the token: that the server lives, the model's name, counts."""
DECLARED_PATHS = {"/tmp": r"rl[0-9.]+-\w{8}", "/var/tmp": r"(?!)", "/dev/shm": r"(?!)"}
"""What the run makes in each folder: the session folder of the agent and no more."""


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    kind: str
    host: str
    port: int

    @property
    def where(self) -> tuple[str, str]:
        scope = {"127.0.0.1": LOOPBACK, "*": ANY, "0.0.0.0": ANY, "[::]": ANY}
        return self.kind, scope.get(self.host, NODE)


class Node:
    """Namespaces with a private network and private folders, which ``holder`` keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {str(base) for base in BASES if base.is_relative_to("/tmp")}
        words = ["unshare", "--mount", "--net", "sh", "-c", SETUP, "sh", str(folder), *sorted(kept)]
        self.kept = {Path(path).relative_to("/tmp").parts[0] for path in kept}
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "ready\n"
        self.enter = ["nsenter", f"--target={self.holder.pid}", "--mount", "--net"]
        self.theirs = set(self.paths())

    def output(self, *command: str) -> str:
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def paths(self) -> list[Path]:
        """Everything directly in the folders that all users can write to."""
        root = Path(f"/proc/{self.holder.pid}/root")
        found = [path for folder in HOLDS for path in (root / folder.lstrip("/")).iterdir()]
        return [path for path in found if path.name not in self.kept]

    def listeners(self) -> list[Listener]:
        found = []
        for line in self.output("ss", "-ltnpH").splitlines():
            host, _, port = line.split()[3].rpartition(":")
            pid = re.search(r"pid=(\d+)", line)
            assert pid, line
            found.append(Listener(kind_of(int(pid[1])), host, int(port)))
        return found

    def processes(self) -> list[psutil.Process]:
        """The processes in the namespaces, without the one that holds them."""
        network = os.readlink(f"/proc/{self.holder.pid}/ns/net")
        found = []
        for process in living():
            try:
                is_inside = os.readlink(f"/proc/{process.pid}/ns/net") == network
            except OSError:
                continue
            if is_inside and process.pid != self.holder.pid:
                found.append(process)
        return found

    def attack(self, listeners: Sequence[Listener]) -> dict[str, Any]:
        """Try everything as the stranger; return what was reached: see ``STRANGER``."""
        addresses = [
            ("127.0.0.2" if one.where[1] == ANY else one.host, one.port) for one in listeners
        ]
        made = [path for path in self.paths() if path not in self.theirs]
        inside = [str(path).partition("/root")[2] for path in made]
        given = {
            "ports": addresses,
            "pages": PAGES,
            "paths": [*inside, str(SEEN_AS / "run")],
            "pids": [process.pid for process in self.processes()],
        }
        words = [sys.executable, "-c", STRANGER, json.dumps(given), str(STRANGER_UID)]
        return json.loads(self.output("env", f"PYTHONPATH={ROOT}", *words).splitlines()[-1])


def kind_of(pid: int) -> str:
    """The kind of a process by its command line, or the line of a process of no kind.

    An engine's scheduler has the engine's line where setproctitle fails: it finds the memory of the
    line through the first variable of the environment, in Ray's random order. If an engine has
    replaced that one (OMP_NUM_THREADS), there is no title.
    """
    process = psutil.Process(pid)
    kind = _kind_by(process)
    parent = process.parent()
    is_child = kind == "engine" and parent is not None and _kind_by(parent) == "engine"
    return "scheduler" if is_child else kind


def _kind_by(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, command)), command)
