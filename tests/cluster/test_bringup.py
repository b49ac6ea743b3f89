"""Agents on real Slurm with real Ray: the nodes find each other on the one network that works, and say who is lost."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.handoff import Cluster
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import REPOSITORY, Lab

BRINGUP_S = 120

# A driver that works on every node by name, before and after it is asked to stop.
DRIVER = """
import os, pathlib, sys, time
import ray
from bootstrap.handoff import Cluster
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
pathlib.Path(cluster.attempt_dir, "cluster").write_text(line)
while not cluster.stop_file.exists():
    time.sleep(0.1)
work("after STOP")
sys.exit(75)
"""

SCRIPT = """\
#!/bin/bash
srun --kill-on-bad-exit=0 --cpu-bind=none --output={attempt}/agent-%N.log {run_if} \\
  {python} -u -m bootstrap.agent --attempt-dir {attempt} --num-gpus 2 --object-store-memory 100000000 {options} \\
  -- {python} {driver} &
trap : TERM
wait
wait
"""


class Attempt:
    """A two-node job that runs agents, and what they leave in their folder."""

    def __init__(self, lab: Lab, name: str, *, run_if: str = "", options: str = "") -> None:
        self.lab = lab
        self.folder = lab.shared / name
        self.folder.mkdir()
        (self.folder / "secret").write_text("5" * 64)
        driver = lab.shared / f"{name}.py"
        driver.write_text(DRIVER)
        script = SCRIPT.format(
            attempt=self.folder, python=sys.executable, driver=driver, run_if=run_if, options=options
        )
        wanted = ["-N2", "--ntasks-per-node=1", "--gres=gpu:2", "-w", "n01,n02"]
        self.job = sbatch(lab, f"{name}.sh", script, *wanted, env={"PYTHONPATH": str(REPOSITORY)})

    def wait_until_it_works(self) -> Cluster:
        until((self.folder / "cluster").exists, self.lab, "a driver that works", deadline_s=BRINGUP_S)
        return Cluster.from_json((self.folder / "cluster").read_text())

    def wait(self) -> tuple[str, str]:
        """Verdict and cause."""
        until((self.folder / "verdict").exists, self.lab, "a verdict", deadline_s=BRINGUP_S)
        document = json.loads((self.folder / "verdict.json").read_text())
        return document["verdict"], document["cause"]

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()


def agents_and_ray(lab: Lab, node: str) -> str:
    """Command lines on a node that belong to an attempt; srun, which waits for Slurm to miss a dead node, does not."""
    lines = lab.run(node, ["ps", "-eo", "args"]).stdout.splitlines()
    return "\n".join(line for line in lines if ("bootstrap." in line or "ray" in line) and not line.startswith("srun"))


@pytest.fixture
def wrong_name(lab: Lab, tmp_path: Path) -> Iterator[None]:
    """On n02 the head's name leads to a decoy, as ``127.0.1.1 $(hostname)`` and stray DNS entries do."""
    hosts = lab.shared / "hosts"
    hosts.write_text("127.0.0.1 localhost\n172.17.0.1 n01\n10.77.0.12 n02\n")
    lab.run("n02", ["mount", "--bind", str(hosts), "/etc/hosts"])
    yield
    lab.start_node("n02")
    lab.wait_idle(["n02"])


def test_two_nodes_work_on_eth0_and_outlive_the_term_of_a_preemption(lab: Lab) -> None:
    """Under proctrack/linuxproc the TERM reaches every process below the task; Ray and the driver are not there."""
    attempt = Attempt(lab, "term")
    cluster = attempt.wait_until_it_works()
    assert [(node.host, node.ip, node.ifname) for node in cluster.nodes] == [
        ("n01", lab.ip("n01"), "eth0"),
        ("n02", lab.ip("n02"), "eth0"),
    ]
    for node in ("n01", "n02"):
        assert f"at first {node} {lab.ip(node)} eth0" in attempt.log("driver.log")
        assert "raylet" in agents_and_ray(lab, node)

    lab.run("ctl", ["scancel", "--signal=TERM", f"{attempt.job}.0"])
    assert attempt.wait()[0] == "requeue"
    for node in ("n01", "n02"):
        assert f"after STOP {node} {lab.ip(node)} eth0" in attempt.log("driver.log")
    until(lambda: job_info(lab, attempt.job).state.name == "COMPLETED", lab, "the end of the job")
    for node in ("n01", "n02"):
        assert agents_and_ray(lab, node) == ""


def test_a_node_that_never_comes_is_named(lab: Lab) -> None:
    never = "sh -c 'test $SLURM_NODEID = 0 || { echo broken image; exit 3; }; exec \"$@\"' -"
    attempt = Attempt(lab, "missing", run_if=never, options="--bringup-deadline-s 3")
    word, cause = attempt.wait()
    assert word == "failed"
    assert "n02 of 2 nodes did not join within 3 s" in cause and "broken image" in cause


def test_a_dead_node_fails_the_attempt_in_seconds_with_its_name(lab: Lab, wrong_name: None) -> None:
    """It also had the wrong address for the head's name, and came in by the addresses that the head publishes."""
    attempt = Attempt(lab, "dead", options="--loss-grace-s 2")
    assert attempt.wait_until_it_works().nodes[1].ip == lab.ip("n02")
    killed_at = time.monotonic()
    lab.kill_node("n02")
    word, cause = attempt.wait()
    assert time.monotonic() - killed_at < 20
    assert word == "failed"
    assert "n02 is gone" in cause
    assert "n02" in attempt.log("STOP")
    until(lambda: agents_and_ray(lab, "n01") == "", lab, "the end of everything on n01")
    lab.run("ctl", ["scancel", attempt.job])
