"""Racks of a large system: a Slurm with topology/block, its --segment and the order of nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurm.render import directives
from tests.cluster import slurm_roots
from tests.cluster.attempts import Attempt
from tests.cluster.jobs import sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_config import LabOptions
from tests.cluster.lab_host import LabError
from tests.settings import a_job


@pytest.fixture(scope="module")
def racks(slurm_available: None) -> Iterator[Lab]:
    """Four nodes of Slurm 24.11 in two blocks, whose names alternate."""
    try:
        slurm_roots.find_or_make("trixie")
    except LabError as error:
        pytest.skip(str(error))
    options = LabOptions(slurm="trixie", blocks=("n01,n03", "n02,n04"))
    with Lab(4, name=f"p{os.getpid()}racks", options=options) as cluster:
        yield cluster


def test_nodes_are_ordered_by_block(racks: Lab) -> None:
    attempt = Attempt(racks, "racks", nodes="n01,n02,n03,n04", stub_ray=True)
    cluster = attempt.wait_until_it_works()
    assert [node.host for node in cluster.nodes] == ["n01", "n03", "n02", "n04"]
    attempt.stop()
    attempt.end()


def test_slurm_accepts_the_segments_of_a_job(racks: Lab) -> None:
    """A segment of two nodes is a block; Slurm refuses one that does not divide the nodes.

    It also knows the options that a site adds.
    """
    site = ("--comment=it's 8 # licences", "--nice=7")
    head = directives(
        a_job(nodes=2, segment=2, time="5", sbatch=site, output=f"{racks.shared}/log")
    )
    job = sbatch(racks, "segment.sbatch", f"{head}echo $SLURM_JOB_NODELIST >nodes\n")
    nodes = racks.shared / "nodes"
    until(lambda: nodes.exists() and nodes.read_text() != "", racks, "the job has run")
    shown = racks.run("ctl", ["scontrol", "--oneliner", "show", "job", job]).stdout
    assert "Comment=it's 8 # licences " in shown and "Nice=7 " in shown
    assert nodes.read_text().strip() in ("n[01,03]", "n[02,04]")
    wrong = head.replace("--segment=2", "--segment=3").replace("--nodes=2", "--nodes=4")
    with pytest.raises(LabError, match="Requested topology configuration is not available"):
        sbatch(racks, "wrong.sbatch", wrong)
