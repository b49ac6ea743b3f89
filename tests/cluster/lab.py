"""A real Slurm cluster on one machine: slurmctld, munge and a slurmd for each node, in namespaces.

    python -m tests.cluster.lab up 4        start four nodes that stay until `down`
    python -m tests.cluster.lab up 4 --slurm trixie     with Slurm of this Debian release
    python -m tests.cluster.lab run ctl sinfo
    python -m tests.cluster.lab run n02 ip addr
    python -m tests.cluster.lab status
    python -m tests.cluster.lab down

Every node has its own network (10.77.0.x, and the unconnected interfaces docker0 and ib0 as
decoys), host name, mounts, process ids, /tmp and /dev/shm, and eight device files that Slurm takes
for GPUs. ``ctl`` is the login node and controller; it has the files of the machine. All nodes see
``Lab.shared``.

Invariants: labs of different names are independent (each has its own bridge); a lab ends only
processes that it started or that run in its namespaces; ``down`` leaves no process, namespace,
mount or file. A lab whose owner died is removed by the next ``up``. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.cluster import lab_config, slurm_roots
from tests.cluster.lab_config import CONTROLLER, SLURMCTLD_PORT, SLURMD_PORT, LabOptions
from tests.cluster.lab_host import (
    LabError,
    build_network,
    do,
    kill_in_namespace,
    listens,
    lock,
    mounts,
    outermost,
    remove_if_empty,
    remove_network,
    search_path,
    start_time,
    wait_until,
    waiting_lock,
    why_unavailable,
)

ROOT = Path("/var/tmp/rlpost-labs")
REPOSITORY = Path(__file__).resolve().parents[2]
KEPT_VARIABLES = ("HOME", "USER", "LOGNAME", "LANG", "TERM", "SHELL")
# Folders that every node needs even below its private /tmp: this checkout and the interpreter.
VISIBLE = outermost([REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()])


class Lab:
    """One cluster. Use as a context manager, or ``up`` and ``down``.

    Args:
        num_nodes: nodes n01, n02, ...
        name: letters and digits; by default made of the process id.
        options: see ``LabOptions``.
    """

    def __init__(
        self, num_nodes: int = 2, *, name: str | None = None, options: LabOptions | None = None
    ) -> None:
        self.name = name or f"p{os.getpid()}"
        if not re.fullmatch(r"[a-z0-9]+", self.name):
            raise LabError(f"lab name {self.name!r}: use lower-case letters and digits only")
        self.num_nodes = num_nodes
        self.options = options or LabOptions()
        self.base = ROOT / self.name
        self.shared = self.base / "shared"
        self.nodes = lab_config.node_names(num_nodes)
        self._lock: int | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self._usr_mount: list[str] = []

    @classmethod
    def attach(cls, name: str) -> Lab:
        """Return the lab of this name that another process has started."""
        state = ROOT / name / "lab.json"
        if not state.exists():
            raise LabError(
                f"no lab {name!r} is up (no {state}); start one with: python -m tests.cluster.lab up 2"
            )
        raw = json.loads(state.read_text())
        return cls(raw["num_nodes"], name=name, options=LabOptions(**raw["options"]))

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    def ip(self, name: str) -> str:
        """IPv4 address of ``ctl`` or of a node."""
        return lab_config.address(name)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a user on the login node: this Python first on PATH, and the variables
        of a site's proxy that does not reach the nodes.
        """
        kept = {key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ}
        kept |= dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
        )
        return {
            **kept,
            "PATH": search_path(),
            "SLURM_CONF": str(self.base / "etc/slurm.conf"),
            **(extra or {}),
        }

    # -- life
    # ---------------------------------------------------------------------------------------------------

    def up(self, *, keep: bool = False, deadline_s: float = 60.0) -> Lab:
        """Start everything and wait until every node is idle.

        Args:
            keep: let the lab outlive this process.

        Raises:
            LabError: the lab cannot run here, is up already, or a node does not come up.
        """
        reason = why_unavailable()
        if reason is not None:
            raise LabError(reason)
        if self.options.slurm is not None:
            self._usr_mount = slurm_roots.usr_mount(slurm_roots.find_or_make(self.options.slurm))
        with waiting_lock(ROOT.parent):
            remove_stale()
            if self.base.exists():
                raise LabError(
                    f"lab {self.name!r} is up already; end it: python -m tests.cluster.lab down"
                )
            for folder in ("etc", "log", "state", "spool", "dev", "pids", "nodes", "shared"):
                (self.base / folder).mkdir(parents=True)
            self._lock = lock(self.base)
            self._save(keep=False)
            try:
                # left by a lab that was killed and whose folder was deleted
                remove_network(self._netns(""))
                build_network(self._netns(""), self.num_nodes)
            except BaseException:
                self._remove()
                raise
        try:
            self._start_services()
            for node in self.nodes:
                self.start_node(node)
            self.wait_idle(self.nodes, deadline_s=deadline_s)
        except BaseException:
            self.down()
            raise
        self._save(keep=keep)
        return self

    def down(self) -> None:
        """End all processes of the lab and remove everything that it created.

        Safe to call twice or on a partly started lab.
        """
        with waiting_lock(ROOT.parent):
            self._remove()

    def start_node(self, node: str) -> None:
        """Power a node on; ``wait_idle([node])`` returns when it is ready."""
        private_tmp = self.base / "nodes" / node / "tmp"
        (self.base / "spool" / node).mkdir(exist_ok=True)
        if not private_tmp.exists():
            private_tmp.mkdir(parents=True)
            private_tmp.chmod(0o1777)
        plan = {
            "host": node,
            "usr": self._usr_mount,
            "private_tmp": str(private_tmp),
            "visible": VISIBLE,
            "cached": [str(self.shared), self.options.shared_cache_s]
            if self.options.shared_cache_s
            else [],
            "munge_socket": str(self.base / "munge.socket"),
            "conf_server": f"{CONTROLLER}:{SLURMCTLD_PORT}" if self.options.is_configless else "",
            "freezer_group": f"rlab-{self.name}-{node}"
            if self.options.proctrack == "cgroup"
            else "",
        }
        unshare = [
            "unshare",
            "--uts",
            "--mount",
            "--pid",
            "--ipc",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        init = [
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__).with_name("node_init.py")),
            json.dumps(plan),
        ]
        self._start(node, ["ip", "netns", "exec", self._netns(node), *unshare, *init])

    def kill_node(self, node: str) -> None:
        """Power a node off: all its processes are gone on return; Slurm is not informed.

        Call ``wait_idle`` first: a node that is powered off while a job ends on it stays COMPLETING
        for a minute after it is back.
        """
        self._kill(node)
        kill_in_namespace(self._netns(node))

    def has_power(self, node: str) -> bool:
        """Whether the node was started and not killed since."""
        return (self.base / "pids" / node).exists()

    def wait_idle(self, nodes: Sequence[str], *, deadline_s: float = 60.0) -> None:
        """Wait until all these nodes are idle.

        Raises:
            LabError: at the deadline; names the nodes and their states.
        """
        states: dict[str, str] = {}

        ports = {CONTROLLER: SLURMCTLD_PORT} | dict.fromkeys(nodes, SLURMD_PORT)

        def all_idle() -> bool:
            # Slurm reports a node as idle for a while after it was powered off, so its slurmd must
            # listen as well.
            if not all(listens(self._outer_pid(name), port) for name, port in ports.items()):
                return False
            answer = self.run(
                CONTROLLER, ["sinfo", "-h", "-N", "-p", "batch", "-o", "%N %T"], check=False
            )
            states.update(
                line.split() for line in answer.stdout.splitlines() if len(line.split()) == 2
            )
            return all(states.get(node) == "idle" for node in nodes)

        if not wait_until(all_idle, deadline_s=deadline_s):
            late = {
                node: states.get(node, "unknown to Slurm")
                for node in nodes
                if states.get(node) != "idle"
            }
            raise LabError(f"nodes not idle after {deadline_s:g} s: {late}\n{self.log_tail()}")

    # -- use
    # ----------------------------------------------------------------------------------------------------

    def popen(
        self,
        where: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on ``ctl`` or on a node, in a new session.

        Args:
            where: ``"ctl"`` or a node's name.
            argv: the command.
            env: variables in addition to ``environment()``.
            cwd: working directory; by default ``shared``.
            options: passed to ``subprocess.Popen``.
        """
        folder = str(cwd or self.shared)
        if where == CONTROLLER:
            # slurmctld runs in the namespaces of the login node and has no others
            target, namespaces = self._outer_pid(where), ("--net", "--uts", "--mount")
        else:
            target, namespaces = self._node_pid(where), ("--all",)
        enter = ["nsenter", "--target", str(target), *namespaces]
        command = [*enter, "env", f"--chdir={folder}", *map(str, argv)]
        return subprocess.Popen(
            command, env=self.environment(env), start_new_session=True, **options
        )

    def run(
        self,
        where: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on ``ctl`` or on a node and return its text output.

        Raises:
            LabError: the exit code is not 0, with ``check``; holds both outputs.
            subprocess.TimeoutExpired: after ``timeout_s``; the command and its children are killed.
        """
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        with self.popen(where, argv, env=env, cwd=cwd, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if check and process.returncode != 0:
            raise LabError(f"{list(argv)} on {where}: exit {process.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of every log of Slurm's daemons."""
        parts = []
        for path in sorted((self.base / "log").glob("*")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts += [f"== {path.name}", *text] if text else []
        return "\n".join(parts)

    # -- inside
    # -------------------------------------------------------------------------------------------------

    def _netns(self, name: str) -> str:
        return f"rlab-{self.name}-{name}"

    def _save(self, *, keep: bool) -> None:
        state = {"num_nodes": self.num_nodes, "options": asdict(self.options), "keep": keep}
        (self.base / "lab.json").write_text(json.dumps(state))

    def _start_services(self) -> None:
        base, etc = self.base, self.base / "etc"
        (etc / "slurm.conf").write_text(lab_config.slurm_conf(base, self.num_nodes, self.options))
        (etc / "gres.conf").write_text(lab_config.gres_conf(base, self.options))
        (etc / "cgroup.conf").write_text(lab_config.cgroup_conf())
        if self.options.blocks:
            (etc / "topology.conf").write_text(lab_config.topology_conf(self.options))
        for name, text in self.options.files:
            (etc / name).write_text(text.replace("@BASE@", str(base)))
            (etc / name).chmod(0o600)  # slurmdbd reads no other
        for index in range(self.options.num_gpus_per_node):
            do("mknod", str(base / f"dev/nvidia{index}"), "c", "1", "3")
        key = base / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [
            f"--{what}={base}/munge.{what.split('-')[0]}"
            for what in ("key-file", "socket", "pid-file", "seed-file")
        ]
        self._start(
            "munged",
            ["munged", "--foreground", "--force", *files, f"--log-file={base}/log/munged.log"],
        )
        if not wait_until((base / "munge.socket").exists, deadline_s=20.0):
            raise LabError(f"munged does not answer\n{self.log_tail()}")
        self._start_accounting()
        start = 'hostname "$0" && { [ $# = 0 ] || mount "$@"; } && exec slurmctld -D -i'
        begin = ["unshare", "--uts", "sh", "-c", start, CONTROLLER, *self._usr_mount]
        self._start(CONTROLLER, ["ip", "netns", "exec", self._netns(CONTROLLER), *begin])

    def _start_accounting(self) -> None:
        """Start what the controller needs before it; nothing in a lab without accounting."""

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.base / f"log/{name}.out").open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=self.environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(process)
        (self.base / "pids" / name).write_text(f"{process.pid} {start_time(process.pid)}")

    def _kill(self, name: str) -> None:
        record = self.base / "pids" / name
        if not record.exists():
            return
        pid, started = record.read_text().split()
        if start_time(int(pid)) == started:  # else another process has this id now
            os.kill(int(pid), signal.SIGKILL)
        for child in [child for child in self._children if child.pid == int(pid)]:
            child.wait()
            self._children.remove(child)
        record.unlink()

    def _outer_pid(self, node: str) -> int:
        """Process id, outside, of the process in the network of ``ctl`` or of a node that keeps its
        namespaces.
        """
        record = self.base / "pids" / node
        if node not in (CONTROLLER, *self.nodes) or not record.exists():
            raise LabError(f"node {node!r} is not running; this lab has {', '.join(self.nodes)}")
        return int(record.read_text().split()[0])

    def _node_pid(self, node: str) -> int:
        """Process id, outside, of the node's process 1."""
        outer = self._outer_pid(node)
        children: list[str] = []

        def exists() -> bool:
            children[:] = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            return bool(children)

        if not wait_until(exists, deadline_s=10.0):
            raise LabError(f"node {node!r} has no process 1\n{self.log_tail()}")
        return int(children[0])

    def _remove(self) -> None:
        for name in [path.name for path in self.base.glob("pids/*")]:
            self._kill(name)
        remove_network(self._netns(""))
        if f" {self.base}/" in mounts():
            raise LabError(
                f"something is mounted below {self.base}; unmount it before the folder is removed"
            )
        shutil.rmtree(self.base, ignore_errors=True)
        remove_if_empty(ROOT)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_stale() -> list[str]:
    """Remove labs whose owner is gone, except those started with ``keep``; return their names."""
    removed = []
    for base in ROOT.glob("*"):
        held = lock(base)
        if held is None:
            continue
        os.close(held)
        state = base / "lab.json"
        if not (state.exists() and json.loads(state.read_text() or "{}").get("keep")):
            Lab(name=base.name)._remove()
            removed.append(base.name)
    return removed


def main() -> int:
    """Run the command line of the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.lab", description="A real Slurm cluster on this machine."
    )
    parser.add_argument("--name", default="hand", help="which lab (default: hand)")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start it")
    up.add_argument("num_nodes", type=int)
    up.add_argument(
        "--grace-time",
        type=int,
        default=LabOptions().grace_time_s,
        help="seconds between preemption and end",
    )
    up.add_argument(
        "--no-user-signal",
        action="store_true",
        help="preemption sends TERM to steps, not the job's signal",
    )
    up.add_argument("--proctrack", choices=("linuxproc", "cgroup"), default="linuxproc")
    up.add_argument(
        "--slurm", choices=slurm_roots.RELEASES, help="of a Debian release; default: this machine's"
    )
    run = verbs.add_parser("run", help="run a command on ctl or a node")
    run.add_argument("where")
    run.add_argument("command", nargs=argparse.REMAINDER)
    verbs.add_parser("status", help="nodes and jobs")
    verbs.add_parser("down", help="end it and remove everything that it created")
    args = parser.parse_args()
    try:
        if args.verb == "up":
            times = {"grace_time_s": args.grace_time, "send_user_signal": not args.no_user_signal}
            options = LabOptions(**times, proctrack=args.proctrack, slurm=args.slurm)
            lab = Lab(args.num_nodes, name=args.name, options=options).up(keep=True)
            print(f"up: {', '.join(lab.nodes)}; shared folder {lab.shared}")
        elif args.verb == "down":
            Lab(name=args.name).down()
        elif args.verb == "status":
            lab = Lab.attach(args.name)
            print(
                lab.run(CONTROLLER, ["sinfo", "-N", "-l"]).stdout
                + lab.run(CONTROLLER, ["squeue", "-a"]).stdout,
                end="",
            )
        else:
            return Lab.attach(args.name).popen(args.where, args.command, cwd=os.getcwd()).wait()
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
