"""What the lab does to the machine: commands, locks, network namespaces, processes.

Functions without state, used by ``lab.py``. The names of a lab's namespaces begin with its prefix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.cluster import lab_config
from tests.cluster.lab_config import CONTROLLER

NETNS_ETC = Path("/etc/netns")
NETNS_RUN = Path("/run/netns")
FREEZER = Path("/sys/fs/cgroup/freezer")
COMMANDS = (
    "ip",
    "unshare",
    "nsenter",
    "mount",
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
)


class LabError(RuntimeError):
    """The lab cannot do what was asked."""


def why_unavailable() -> str | None:
    """Return the reason why no lab can run here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "the Slurm lab needs Linux and root, to make network namespaces"
    missing = [command for command in COMMANDS if shutil.which(command, path=search_path()) is None]
    if missing:
        return f"the Slurm lab needs {', '.join(missing)}; on Debian: apt-get install slurm-wlm munge iproute2"
    probe = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True
    )
    if probe.returncode != 0:
        return f"the Slurm lab cannot make namespaces here: {probe.stderr.strip()}"
    return None


def why_no_cached_folder() -> str | None:
    """Return the reason why nodes cannot cache the shared folder here, or None."""
    if not Path("/dev/fuse").exists():
        return "caching the shared folder needs FUSE, and there is no /dev/fuse"
    if shutil.which("bindfs", path=search_path()) is None:
        return "caching the shared folder needs bindfs; on Debian: apt-get install bindfs"
    return None


PAUSE_SHARE, LONGEST_PAUSE_S = 0.05, 0.5
"""A pause of ``wait_until``, as a share of the time that it has waited, and its limit."""


def wait_until(
    condition: Callable[[], bool], *, deadline_s: float, interval_s: float = 0.05
) -> bool:
    """Poll until the condition is true; return False at the deadline.

    For conditions that neither Slurm nor the kernel reports as an event. Pauses grow with the time
    waited, because most conditions ask Slurm, for which a process runs three programs.
    """
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        if waited > deadline_s:
            return False
        time.sleep(max(interval_s, min(waited * PAUSE_SHARE, LONGEST_PAUSE_S)))
    return True


def do(*argv: str) -> str:
    """Run a command and return its output; LabError with its error output when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _ip_batch(netns: str, lines: list[str]) -> None:
    done = subprocess.run(
        ["ip", "-n", netns, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise LabError(f"ip -n {netns}: {done.stderr.strip()}")


def search_path() -> str:
    """PATH in the lab: the folder of this Python, then those of the system."""
    return f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def outermost(folders: list[Path]) -> list[str]:
    """Return the folders that are below none of the others."""
    distinct = sorted(set(folders))
    return [
        str(one)
        for one in distinct
        if not any(one != other and one.is_relative_to(other) for other in distinct)
    ]


def start_time(pid: int) -> str:
    """Clock ticks since boot at which a process started; empty if it does not exist.

    Together with the process id it is unique, although ids are reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def listens(pid: int, port: int) -> bool:
    """Whether a process listens on this TCP port in the network namespace of ``pid``."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    sockets = (line.split() for line in lines)
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in sockets)


def mounts() -> str:
    """The mounts that this process sees, as the kernel lists them."""
    return Path("/proc/self/mountinfo").read_text()


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def lock(folder: Path) -> int | None:
    """Lock a folder and return the descriptor that holds the lock.

    None if another process holds it or the folder does not exist.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def waiting_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; waits for another holder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def build_network(prefix: str, num_nodes: int) -> None:
    """Create the namespaces, a bridge between them and, on each node, the decoys docker0 and ib0."""
    switch = f"{prefix}sw"
    do("ip", "netns", "add", switch)
    _ip_batch(switch, ["link set lo up", "link add br0 type bridge", "link set br0 up"])
    for name in (CONTROLLER, *lab_config.node_names(num_nodes)):
        netns, address = f"{prefix}{name}", lab_config.address(name)
        etc = NETNS_ETC / netns
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(lab_config.hosts(num_nodes))
        (etc / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        do("ip", "netns", "add", netns)
        do(*f"ip link add eth0 netns {netns} type veth peer name v-{name} netns {switch}".split())
        _ip_batch(switch, [f"link set v-{name} master br0 up"])
        lines = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
        if name != CONTROLLER:
            decoy = "192.168.100." + address.rsplit(".", 1)[1]
            lines += [
                "link add docker0 type bridge",
                "addr add 172.17.0.1/16 dev docker0",
                "link set docker0 up",
            ]
            lines += ["link add ib0 type veth peer name ib0p", f"addr add {decoy}/24 dev ib0"]
            lines += ["link set ib0 up", "link set ib0p up"]
        _ip_batch(netns, lines)


def kill_in_namespace(netns: str) -> None:
    """Kill every process of this network namespace.

    Raises:
        LabError: some are still there after 20 s.
    """

    def empty() -> bool:
        pids = do("ip", "netns", "pids", netns).split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not pids

    if not wait_until(empty, deadline_s=20.0):
        raise LabError(
            f"processes of {netns} survive SIGKILL: {do('ip', 'netns', 'pids', netns).split()}"
        )


def remove_network(prefix: str) -> None:
    """Kill the processes in the namespaces of this prefix, and remove the namespaces with their
    files in /etc and /run.
    """
    for netns in [path.name for path in NETNS_RUN.glob(f"{prefix}*")]:
        kill_in_namespace(netns)
        do("ip", "netns", "del", netns)
    for etc in NETNS_ETC.glob(f"{prefix}*"):
        shutil.rmtree(etc)
    remove_if_empty(NETNS_ETC)
    if f" {NETNS_RUN} " in mounts() and not any(NETNS_RUN.iterdir()):
        do("umount", str(NETNS_RUN))  # `ip netns add` bind-mounts it on itself
    for group in sorted(FREEZER.glob(f"{prefix}*/**/"), reverse=True):
        group.rmdir()
