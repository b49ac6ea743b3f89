"""Spare nodes on real Slurm: they replace unfit and lost nodes, and the loss of a spare has no effect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.lost_nodes import read_lost_nodes, write_replaceable
from tests.cluster.attempts import Attempt, on_node
from tests.cluster.jobs import until
from tests.cluster.lab import VISIBLE, Lab

AGENT = "^[^ ]*python[^ ]* -u -m bootstrap.agent "


@pytest.fixture
def full_temp_dir(lab: Lab) -> Iterator[str]:
    """On n02 /tmp is full. Code below /tmp stays visible."""
    script = """set -e
        mkdir -p /run/under; mount --rbind /tmp /run/under; mount -t tmpfs -o size=1m tmpfs /tmp
        for folder; do mkdir -p "$folder"; mount --rbind "/run/under${folder#/tmp}" "$folder"; done"""
    below = [folder for folder in VISIBLE if folder.startswith("/tmp/")]
    lab.run("n02", ["bash", "-c", script, "bash", *below])
    yield "n02"
    lab.run("n02", ["umount", "--lazy", "/tmp", "/run/under"])


def test_a_spare_replaces_an_unfit_node_whose_later_loss_has_no_effect(
    lab: Lab, full_temp_dir: str
) -> None:
    attempt = Attempt(lab, "spare", nodes="n01,n02,n03", options="--spare-nodes 1", stub_ray=True)
    cluster = attempt.wait_until_it_works()
    assert [node.host for node in cluster.nodes] == ["n01", "n03"]
    assert "n02 is replaced by a spare node: temp-dir" in attempt.log("agent-n01.log")
    assert not (attempt.folder / "ray-n02.log").exists()
    attempt.kill("n02", "bootstrap.agent --attempt-dir")
    attempt.stop()
    assert attempt.wait() == (
        "requeue",
        "the driver committed a consistent state and exited with 75",
    )
    attempt.end()


def test_a_spare_replaces_a_node_that_never_joins(lab: Lab) -> None:
    """At once, without waiting for ``--spare-wait-s``: srun reports that the node's task failed."""
    never, options = on_node(1, "exit 3"), "--spare-nodes 1 --spare-wait-s 600"
    attempt = Attempt(
        lab, "late", nodes="n01,n02,n03", run_if=never, options=options, stub_ray=True
    )
    assert [node.host for node in attempt.wait_until_it_works().nodes] == ["n01", "n03"]
    assert "n02 failed before it joined: Exited with exit code 3" in attempt.log("agent-n01.log")
    attempt.stop()
    assert attempt.wait()[0] == "requeue"
    attempt.end()


def test_spares_replace_nodes_lost_during_a_run_until_none_is_left(
    lab: Lab,
) -> None:
    options = "--spare-nodes 2 --loss-grace-s 1"
    attempt = Attempt(lab, "lost", nodes="n01,n02,n03,n04", options=options, stub_ray=True)
    assert [node.host for node in attempt.wait_until_it_works().nodes] == ["n01", "n02"]
    write_replaceable(attempt.folder, ["n02", "n03", "n04"])  # as a driver does
    for lost, spare in (("n02", "n03"), ("n03", "n04")):
        attempt.kill(lost, AGENT)
        until(
            lambda lost=lost: (
                (lost, "replaced")
                in [(node.host, node.state) for node in read_lost_nodes(attempt.folder)]
            ),
            lab,
            f"a spare in place of {lost}",
        )
        found = read_lost_nodes(attempt.folder)[-1]
        assert found.replacement is not None and found.replacement.host == spare
        assert (attempt.folder / f"ray-{spare}.log").exists()
    assert not (attempt.folder / "verdict").exists() and not (attempt.folder / "STOP").exists()
    attempt.kill("n04", AGENT)
    word, cause = attempt.wait()
    assert word == "failed" and cause.startswith("n04 is gone: the connection was closed")
    attempt.end()


def test_without_spares_the_job_is_requeued_without_the_unfit_node(
    lab: Lab, full_temp_dir: str
) -> None:
    attempt = Attempt(lab, "nospare", stub_ray=True)
    word, cause = attempt.wait()
    assert word == "requeue"
    assert (
        "1 of 2 nodes are fit, 2 are needed" in cause
        and "n02: temp-dir: 0.00 GiB free in /tmp (tmpfs)" in cause
    )
    assert attempt.verdict["exclude"] == attempt.excluded == ["n02"]
    attempt.end()
