"""Failures injected into an attempt on real Slurm: each is found in seconds and named, and leaves no
process.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.cluster.attempts import Attempt, on_node
from tests.cluster.jobs import until
from tests.cluster.lab import Lab


def test_a_dead_ray_of_a_worker_is_found_in_seconds(lab: Lab) -> None:
    """A real raylet that dies: tests/contract/test_agent.py; a real GCS: test_security.py."""
    attempt = Attempt(lab, "worker", options="--loss-grace-s 2", stub_ray=True)
    attempt.wait_until_it_works()
    attempt.kill("n02", "bootstrap.agent.ray_process")
    seconds = attempt.seconds_to_verdict()
    print(f"Ray of n02: {seconds:.1f} s")
    assert seconds < 15
    assert attempt.verdict["verdict"] == "failed"
    cause = "n02: Ray ended by itself"
    assert str(attempt.verdict["cause"]).startswith(cause)
    assert attempt.excluded == []  # the machine is not at fault
    assert cause in attempt.log("STOP")  # the driver was given time to stop
    attempt.end()


# anchored, because the command line of srun contains the same words
AGENT = "^[^ ]*python[^ ]* -u -m bootstrap.agent "


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        ("n02", "n02 is gone: the connection was closed"),
        ("n01", "n02 lost the head n01: the connection was closed"),
    ],
)
def test_an_agent_that_dies_is_found_in_seconds(lab: Lab, node: str, cause: str) -> None:
    """Ray is a stub: its state plays no part in the decision."""
    attempt = Attempt(lab, f"killed{node}", options="--loss-grace-s 2", stub_ray=True)
    attempt.wait_until_it_works()
    attempt.kill(node, AGENT)
    seconds = attempt.seconds_to_verdict()
    print(f"KILL to the agent of {node}: {seconds:.1f} s")
    assert seconds < 8
    assert attempt.verdict["verdict"] == "failed"
    assert str(attempt.verdict["cause"]).startswith(cause)
    assert attempt.excluded == []
    attempt.end()


def test_an_agent_that_hangs_is_found_in_seconds(lab: Lab) -> None:
    """A node's, which is excluded, and a head's; at the same time."""
    pairs = {"n02": "n01,n02", "n03": "n03,n04"}
    hanging = {
        node: Attempt(lab, f"hangs{node}", nodes=nodes, options="--loss-grace-s 2", stub_ray=True)
        for node, nodes in pairs.items()
    }
    for attempt in hanging.values():
        attempt.wait_until_it_works()
    stopped_at = time.monotonic()
    for node, attempt in hanging.items():
        attempt.kill(node, AGENT, "STOP")
    causes = {
        "n02": "n02 is gone: it has been silent for 10 s: its agent hangs or is stopped",
        "n03": "n04 lost the head n03: it has been silent for 10 s",
    }
    for node, attempt in hanging.items():
        word, cause = attempt.wait()
        print(f"STOP to the agent of {node}: {time.monotonic() - stopped_at:.1f} s")
        assert time.monotonic() - stopped_at < 20
        assert word == "failed" and cause.startswith(causes[node])
    assert (hanging["n02"].excluded, hanging["n03"].excluded) == (["n02"], [])
    lab.run("ctl", ["scancel", *(attempt.job for attempt in hanging.values())])
    for attempt in hanging.values():
        attempt.end()


def test_a_machine_that_loses_its_network_is_found_in_seconds_and_excluded(
    lab: Lab,
) -> None:
    """As after a loss of power: the connection is never closed."""
    attempt = Attempt(lab, "cut", options="--loss-grace-s 2", stub_ray=True)
    attempt.wait_until_it_works()
    lab.run("n02", ["ip", "link", "set", "eth0", "down"])
    cut_at = time.monotonic()
    try:
        report = attempt.folder / "verdict.json"  # written after the list of hosts to exclude
        until(
            lambda: report.exists() and attempt.excluded == ["n02"],
            lab,
            "a verdict of the head",
            deadline_s=30,
        )
        print(f"network of n02 cut: {time.monotonic() - cut_at:.1f} s")
        until(lambda: str(attempt.verdict["cause"]).startswith("n02 is gone"), lab, "its cause")
        assert "does not answer" in str(attempt.verdict["cause"]) or "silent" in str(
            attempt.verdict["cause"]
        )
    finally:
        lab.run("n02", ["ip", "link", "set", "eth0", "up"])
    attempt.end()


def test_a_driver_that_is_killed_is_found_in_seconds(lab: Lab) -> None:
    attempt = Attempt(lab, "driver", options="--driver-restarts 0", stub_ray=True)
    attempt.wait_until_it_works()
    attempt.kill("n01", "^[^ ]*python[^ ]* [^ ]*/driver.py")
    seconds = attempt.seconds_to_verdict()
    print(f"KILL to the driver: {seconds:.1f} s")
    assert seconds < 10
    assert attempt.verdict["verdict"] == "failed"
    assert "the driver ended with signal SIGKILL" in str(attempt.verdict["cause"])
    attempt.end()


def test_a_temp_disk_that_fills_is_found_in_seconds_and_its_node_named(lab: Lab) -> None:
    attempt = Attempt(lab, "full", options="--loss-grace-s 2", stub_ray=True)
    attempt.wait_until_it_works()
    folder = f"/tmp/r{attempt.job}.0"
    lab.run("n02", ["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", folder])
    try:
        lab.run("n02", ["dd", "if=/dev/zero", f"of={folder}/fill", "bs=1M", "count=140"])
        seconds = attempt.seconds_to_verdict()
    finally:
        lab.run("n02", ["umount", "--lazy", folder])
    print(f"temp disk full: {seconds:.1f} s")
    assert seconds < 10
    assert attempt.verdict["verdict"] == "failed"
    assert str(attempt.verdict["cause"]).startswith(
        f"n02: Ray's temp dir {folder} is full: 10 MiB left of 150"
    )
    assert attempt.excluded == ["n02"]
    assert "temp dir" in attempt.log("STOP")  # the driver was given time to stop
    attempt.end()


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_fails_before_its_agent_is_named_in_seconds_and_excluded(
    lab: Lab, number: int
) -> None:
    """No node waits for the deadline of ten minutes. The head reports another node; another node
    reports the head.
    """
    host, fails = f"n0{number + 1}", on_node(number, "echo broken image; exit 3")
    attempt = Attempt(lab, f"never{number}", run_if=fails, stub_ray=True)
    seconds = attempt.seconds_to_verdict()
    print(f"{host} fails before its agent: {seconds:.1f} s")
    assert seconds < 30
    assert attempt.verdict["verdict"] == "failed"
    cause = str(attempt.verdict["cause"])
    assert (
        cause.startswith(f"{host} failed before it joined: Exited with exit code 3")
        and "broken image" in cause
    )
    assert attempt.excluded == [host]
    attempt.end()


def test_a_node_whose_agent_hangs_before_it_joins_is_named_at_the_deadline(lab: Lab) -> None:
    hangs = on_node(1, "echo dead mount; sleep 60")
    attempt = Attempt(lab, "hangs", run_if=hangs, options="--bringup-deadline-s 3", stub_ray=True)
    word, cause = attempt.wait()
    assert word == "failed"
    assert "n02 of 2 nodes did not join within 3 s" in cause and "dead mount" in cause
    assert attempt.excluded == ["n02"]
    attempt.end()


def test_a_node_without_the_run_folder_is_named_with_the_likely_cause(lab: Lab) -> None:
    """Slurm cannot even open the log of its agent, and says so through srun."""
    lab.run("n02", ["mount", "-t", "tmpfs", "tmpfs", str(lab.shared)], cwd="/")
    attempt = Attempt(lab, "nofolder", stub_ray=True)
    try:
        word, cause = attempt.wait()
    finally:
        lab.run("n02", ["umount", str(lab.shared)], cwd="/")
    assert word == "failed"
    assert cause.startswith("n02 failed before it joined: Slurmd could not connect IO")
    assert "probably its agent never started" in cause and "not mounted" in cause
    assert attempt.excluded == ["n02"]
    attempt.end()


def test_another_version_of_ray_on_a_node_is_a_configuration_error(lab: Lab) -> None:
    other = lab.shared / "other"
    (other / "ray-2.59.0.dist-info").mkdir(parents=True)
    (other / "ray-2.59.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ray\nVersion: 2.59.0\n"
    )
    attempt = Attempt(
        lab, "version", run_if=on_node(1, f"export PYTHONPATH={other}:$PYTHONPATH"), stub_ray=True
    )
    print(f"wrong version: {attempt.seconds_to_verdict():.1f} s after sbatch")
    word, cause = attempt.wait()
    assert word == "config"
    assert "n02 has ray 2.59.0" in cause and "same environment or image" in cause
    attempt.end()


def test_a_slow_head_is_waited_for(lab: Lab) -> None:
    """The other node starts first, cannot connect, and retries."""
    attempt = Attempt(lab, "slow", run_if=on_node(0, "sleep 3"), stub_ray=True)
    assert [node.host for node in attempt.wait_until_it_works().nodes] == ["n01", "n02"]
    attempt.stop()
    assert attempt.wait()[0] == "requeue"
    attempt.end()


# Listens as long as its parent exists: the shell that becomes the agent.
LISTEN = """
import os, pathlib, socket, sys, time
from common.port_blocks import candidate_blocks, ephemeral_floor
agent = os.getppid()
base = next(candidate_blocks(os.environ["SLURM_JOB_ID"], ephemeral_floor())).base
taken = socket.create_server(("", base + 4))
pathlib.Path(sys.argv[1]).touch()
while os.getppid() == agent:
    time.sleep(0.05)
"""


def test_a_taken_port_is_found_before_ray_starts(lab: Lab) -> None:
    script = lab.shared / "listen.py"
    script.write_text(LISTEN)
    listens = lab.shared / "listens"
    first = f"{sys.executable} {script} {listens} & while [ ! -e {listens} ]; do sleep 0.05; done"
    attempt = Attempt(lab, "port", run_if=on_node(1, first), stub_ray=True)
    word, cause = attempt.wait()
    assert word == "requeue"
    assert "n02: ports: " in cause and "taken by another process" in cause
    assert attempt.excluded == ["n02"]
    attempt.end()
