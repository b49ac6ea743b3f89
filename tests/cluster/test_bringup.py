"""Agents on real Slurm with real Ray: the nodes find each other on the one network that works, and
the verdict names a lost node.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.attempts import Attempt, agents_and_ray
from tests.cluster.jobs import job_info, only_step, until
from tests.cluster.lab import Lab


@pytest.fixture
def wrong_name(lab: Lab, tmp_path: Path) -> Iterator[None]:
    """On n02 the head's name resolves to a decoy, as with ``127.0.1.1 $(hostname)`` in /etc/hosts
    and with stray DNS entries.
    """
    hosts = lab.shared / "hosts"
    hosts.write_text("127.0.0.1 localhost\n172.17.0.1 n01\n10.77.0.12 n02\n")
    lab.run("n02", ["mount", "--bind", str(hosts), "/etc/hosts"])
    yield
    lab.start_node("n02")
    lab.wait_idle(["n02"])


@pytest.fixture(scope="module", autouse=True)
def unwarned(lab: Lab) -> Attempt:
    """An attempt of one minute, which passes while the other tests run."""
    lead = "--signal-lead-s 45"
    return Attempt(lab, "unwarned", nodes="n03,n04", options=lead, stub_ray=True, time_limit="1")


def test_two_nodes_work_on_eth0_and_survive_the_term_of_a_preemption(lab: Lab) -> None:
    """Under proctrack/linuxproc TERM reaches every process below the task. Ray and the driver are
    not below it.
    """
    attempt = Attempt(lab, "term")
    cluster = attempt.wait_until_it_works()
    assert [(node.host, node.ip, node.ifname) for node in cluster.nodes] == [
        ("n01", lab.ip("n01"), "eth0"),
        ("n02", lab.ip("n02"), "eth0"),
    ]
    for node in ("n01", "n02"):
        assert f"at first {node} {lab.ip(node)} eth0" in attempt.log("driver.log")
        assert "raylet" in agents_and_ray(lab, node)

    lab.run("ctl", ["scancel", "--signal=TERM", only_step(lab, attempt.job)])
    assert attempt.wait()[0] == "requeue"
    for node in ("n01", "n02"):
        assert f"after STOP {node} {lab.ip(node)} eth0" in attempt.log("driver.log")
    until(lambda: job_info(lab, attempt.job).state.name == "COMPLETED", lab, "the end of the job")
    for node in ("n01", "n02"):  # a keeper ends after its agent
        until(
            lambda node=node: agents_and_ray(lab, node) == "",
            lab,
            f"the end of all processes on {node}",
        )


def test_a_job_without_a_signal_is_stopped_before_its_time_limit(unwarned: Attempt) -> None:
    """Submitted without --signal: the head watches the clock. The job has one minute, the lead is
    45 s.
    """
    unwarned.wait_until_it_works()
    assert unwarned.wait()[0] == "requeue"
    stop = json.loads(unwarned.log("STOP"))
    assert "no signal arrived" in stop["reason"]
    assert stop["deadline"] - stop["time"] == pytest.approx(45, abs=10)
    unwarned.end()


def test_a_dead_node_fails_the_attempt_in_seconds_with_its_name(lab: Lab, wrong_name: None) -> None:
    """It also resolves the head's name to a wrong address, and joins by the addresses that the
    head publishes.
    """
    attempt = Attempt(lab, "dead", options="--loss-grace-s 2", stub_ray=True)
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
