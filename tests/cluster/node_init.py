"""Process 1 of a lab node, run as a script inside the node's namespaces.

Input: a JSON object as argument (see ``Lab.start_node``). Sets the host name, mounts the node's
private /tmp and /dev/shm, starts slurmd, and reaps orphans until slurmd ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def hide_tmp(private: Path, visible: list[str]) -> None:
    """Mount ``private`` over /tmp; the ``visible`` folders below /tmp stay at their paths."""
    for folder in visible:
        path = Path(folder)
        if path.is_relative_to("/tmp"):
            target = private / path.relative_to("/tmp")
            target.mkdir(parents=True, exist_ok=True)
            mount("--rbind", folder, str(target))
    mount("--rbind", str(private), "/tmp")
    mount("-t", "tmpfs", "-o", "size=4g,mode=1777", "tmpfs", "/dev/shm")


def cache(folder: str, seconds: int) -> None:
    """Mount ``folder`` over itself through FUSE, so that the kernel caches names and attributes for
    ``seconds``.

    A file that this node looked up before another node created it stays hidden for that time, as
    with the negative cache of an NFS client. The daemon is a process of this node and ends with it.
    """
    kept = ",".join(f"{what}_timeout={seconds}" for what in ("attr", "entry", "negative"))
    subprocess.run(["bindfs", "-o", kept, folder, folder], check=True)


def mount_freezer(group: str) -> None:
    """Give the node a cgroup v1 freezer whose root is ``group``.

    ``ip netns exec`` mounts a new /sys, which hides the freezer of the machine.
    """
    mount("-t", "tmpfs", "cgroup", "/sys/fs/cgroup")
    whole = Path("/sys/fs/cgroup/.freezer")
    own = Path("/sys/fs/cgroup/freezer")
    whole.mkdir()
    own.mkdir()
    mount("-t", "cgroup", "-o", "freezer", "cgroup", str(whole))
    (whole / group).mkdir(exist_ok=True)
    mount("--bind", str(whole / group), str(own))


def main() -> int:
    plan = json.loads(sys.argv[1])
    socket.sethostname(plan["host"])
    if plan["usr"]:
        mount(*plan["usr"])
    hide_tmp(Path(plan["private_tmp"]), plan["visible"])
    if plan["cached"]:
        cache(*plan["cached"])
    if plan["freezer_group"]:
        mount_freezer(plan["freezer_group"])
    slurmd = shutil.which("slurmd")
    if slurmd is None:
        raise FileNotFoundError("slurmd is not on PATH; install slurmd (Debian: slurm-wlm)")
    command = [slurmd, "-D", "-N", plan["host"]]
    if plan["conf_server"]:
        for folder in ("/run/slurm", "/run/munge"):  # a copy of the files for each node
            Path(folder).mkdir(exist_ok=True)
            mount("-t", "tmpfs", "tmpfs", folder)
        # The first request is made before slurm.conf with its AuthInfo is known.
        Path("/run/munge/munge.socket.2").symlink_to(plan["munge_socket"])
        os.environ.pop("SLURM_CONF")
        command += ["--conf-server", plan["conf_server"]]
    daemon = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: daemon.terminate())
    while True:
        pid, status = os.wait()
        if pid == daemon.pid:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
