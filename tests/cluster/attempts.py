"""Jobs on the lab that run agents, and the files of their attempt."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from common.cluster import Cluster
from tests.cluster.jobs import sbatch, until
from tests.cluster.lab import REPOSITORY, Lab
from tests.cluster.lab_host import wait_until

BRINGUP_S = 300
STUB_RAY = REPOSITORY / "tests/fakes/ray_stub"

# A driver that runs a Ray task on every node, before and after the request to stop.
DRIVER = """
import os, pathlib, sys, time
import ray
from common.cluster import Cluster
line = sys.stdin.readline()
if not line:
    sys.exit("no cluster")
cluster = Cluster.from_json(line)
ray.init(address=cluster.ray_address, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_gpus=1)
def where():
    return [os.uname().nodename, ray.util.get_node_ip_address(), os.environ["GLOO_SOCKET_IFNAME"]]

def work(when):
    for node in cluster.nodes:
        print(when, *ray.get(where.options(resources={f"node:{node.ip}": 0.01}).remote()), flush=True)

work("at first")
pathlib.Path(cluster.attempt_dir, ".cluster").write_text(line)
os.replace(pathlib.Path(cluster.attempt_dir, ".cluster"), pathlib.Path(cluster.attempt_dir, "cluster"))
while not cluster.stop_file.exists():
    time.sleep(0.1)
work("after STOP")
sys.exit(75)
"""

# The same without Ray.
IDLE_DRIVER = """
import os, pathlib, sys, time
from common.cluster import Cluster
line = sys.stdin.readline()
if not line:
    sys.exit("no cluster")
cluster = Cluster.from_json(line)
pathlib.Path(cluster.attempt_dir, ".cluster").write_text(line)
os.replace(pathlib.Path(cluster.attempt_dir, ".cluster"), pathlib.Path(cluster.attempt_dir, "cluster"))
while not cluster.stop_file.exists():
    time.sleep(0.05)
sys.exit(75)
"""

SCRIPT = """\
#!/bin/bash
srun --kill-on-bad-exit=0 --cpu-bind=none --output={attempt}/agent-%N.log 2>>{attempt}/launch.log {run_if} \\
  {python} -u -m bootstrap.agent --attempt-dir {attempt} --num-gpus 2 --object-store-memory 100000000 {options} \\
  -- {python} {driver} &
trap : TERM
wait
wait
"""


def on_node(number: int, command: str) -> str:
    """A value of ``run_if`` that runs a shell command on one node of the step before its agent."""
    return f"sh -c 'test $SLURM_NODEID != {number} || {{ {command}; }}; exec \"$@\"' -"


class Attempt:
    """A job that runs agents.

    Args:
        nodes: as ``sbatch -w`` takes them.
        run_if: a prefix of the agent's command, see ``on_node``.
        options: further options of the agent.
        stub_ray: start a stub instead of Ray, for tests of the agents alone.
        user: the owner of the job.
        time_limit: as sbatch takes it.
    """

    def __init__(
        self,
        lab: Lab,
        name: str,
        *,
        nodes: str = "n01,n02",
        run_if: str = "",
        options: str = "",
        stub_ray: bool = False,
        user: str = "root",
        time_limit: str | None = None,
    ) -> None:
        self.lab = lab
        self.folder = lab.shared / name
        self.folder.mkdir()
        (self.folder / "secret").write_text(("5" if user == "root" else "7") * 64)
        driver = lab.shared / f"{name}.py"
        driver.write_text(IDLE_DRIVER if stub_ray else DRIVER)
        script = SCRIPT.format(
            attempt=self.folder,
            python=sys.executable,
            driver=driver,
            run_if=run_if,
            options=options,
        )
        num_nodes = len(nodes.split(","))
        wanted = [f"-N{num_nodes}", "--ntasks-per-node=1", "--gres=gpu:2", "-w", nodes]
        wanted += [f"--time={time_limit}"] if time_limit else []
        path = f"{STUB_RAY}:{REPOSITORY}" if stub_ray else str(REPOSITORY)
        environ = {"PYTHONPATH": path}
        if user != "root":
            wanted += [f"--uid={user}", f"--output={self.folder}/job.log"]
            environ["HOME"] = "/tmp"
            for path_of_theirs in (self.folder, self.folder / "secret"):
                shutil.chown(path_of_theirs, user)
        self.job = sbatch(lab, f"{name}.sh", script, *wanted, env=environ)

    def wait_until_it_works(self) -> Cluster:
        ready, over = self.folder / "cluster", self.folder / "verdict"
        until(
            lambda: ready.exists() or over.exists(),
            self.lab,
            "a driver that works",
            deadline_s=BRINGUP_S,
        )
        assert ready.exists(), self.verdict["cause"]
        return Cluster.from_json((self.folder / "cluster").read_text())

    def stop(self) -> None:
        """Ask for the stop, as the batch script does before a time limit."""
        (self.folder / "STOP").write_text('{"reason": "enough"}')

    def wait(self) -> tuple[str, str]:
        """Verdict and cause."""
        until((self.folder / "verdict").exists, self.lab, "a verdict", deadline_s=BRINGUP_S)
        return self.verdict["verdict"], self.verdict["cause"]

    def seconds_to_verdict(self) -> float:
        """Wait for the verdict; return the seconds that it took from now."""
        started_at = time.monotonic()
        self.wait()
        return time.monotonic() - started_at

    @property
    def verdict(self) -> dict[str, object]:
        return json.loads((self.folder / "verdict.json").read_text())

    @property
    def excluded(self) -> list[str]:
        """Hosts in the file ``exclude``, which the batch script reads."""
        path = Path(self.folder / "exclude")
        return path.read_text().split() if path.exists() else []

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def kill(self, node: str, pattern: str, signal: str = "KILL") -> None:
        """Send a signal to the processes of a node whose command line matches; fails if none does."""
        # the node has its own process namespace: no other process can match
        self.lab.run(node, ["pkill", f"-{signal}", "-f", pattern])

    def end(self) -> None:
        """Cancel the job and wait until no process of it is left."""
        self.lab.run("ctl", ["scancel", self.job], check=False)
        for node in self.lab.nodes:
            assert wait_until(lambda n=node: not agents_and_ray(self.lab, n), deadline_s=60), (
                f"left on {node}:\n{agents_and_ray(self.lab, node)}"
            )
        self.lab.wait_idle(self.lab.nodes)


def agents_and_ray(lab: Lab, node: str) -> str:
    """Command lines of the agents, drivers and Ray processes on a node.

    Without those of srun, which contain the same words.
    """
    lines = lab.run(node, ["ps", "-eo", "args"]).stdout.splitlines()
    markers = ("bootstrap.", "ray", str(lab.shared))
    return "\n".join(
        line
        for line in lines
        if any(marker in line for marker in markers) and not line.startswith("srun")
    )
