"""Hosts of one block or switch become neighbours, also where a spare replaces one of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import cast

import pytest

from bootstrap.agent.gathering import Gathering, Levels, by_topology, topology_path
from bootstrap.agent.options import Options
from bootstrap.agent.rendezvous import NodeReport, Reception
from bootstrap.check_result import Check
from bootstrap.links.identity import Facts
from bootstrap.links.link import Link
from bootstrap.preflight.shared_folder import FolderTest
from bootstrap.preflight.table import HostFacts


def order(**paths: str) -> str:
    """Order hosts, in the order given, whose paths are texts such as ``s0.s1``."""
    split: dict[str, Levels] = {
        host: tuple(path.split(".")) for host, path in paths.items() if path
    }
    return " ".join(by_topology(tuple(paths), split))


def test_an_address_is_read_with_its_pattern() -> None:
    def path(address: str, pattern: str) -> Levels:
        names = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
        return topology_path(names)

    assert path("block1.n01", "block.node") == ("block1",)
    assert path("s0.s1.n03", "switch.switch.node") == ("s0", "s1")
    assert path("n03.example.org", "node") == ()
    assert path("s0.n03.example.org", "switch.node") == ("s0",)
    assert topology_path({}) == ()


def test_hosts_of_a_block_become_neighbours_and_the_head_stays_first() -> None:
    assert order(n1="b2", n2="b1", n3="b2", n4="b1") == "n1 n3 n2 n4"


def test_hosts_below_one_leaf_switch_stay_together_within_those_of_the_spine() -> None:
    given = {"n1": "s0.s1", "n2": "s9.s3", "n3": "s0.s2", "n4": "s9.s4", "n5": "s0.s1"}
    assert order(**given) == "n1 n5 n3 n2 n4"


def test_without_addresses_or_with_equal_ones_the_order_is_that_of_slurm() -> None:
    assert order(n1="", n2="", n3="") == "n1 n2 n3"
    assert order(n1="b1", n2="b1", n3="b1") == "n1 n2 n3"


def test_a_host_without_an_address_stays_beside_its_predecessor() -> None:
    assert order(n1="b1", n2="b2", n3="", n4="b1") == "n1 n4 n2 n3"
    assert order(n1="", n2="", n3="b2", n4="b1", n5="b2") == "n1 n2 n3 n5 n4"


class Joined(Reception):
    """The given nodes have joined; nothing is sent to them."""

    def __init__(self, hosts: tuple[str, ...], facts: dict[str, HostFacts]) -> None:
        super().__init__(b"", hosts, lambda report, link: None)
        for rank, host in enumerate(hosts):
            if rank > 0 and host in facts:
                self.reports[rank] = NodeReport(host, rank, 0, host_facts=asdict(facts[host]))
                self.links[rank] = cast(Link, None)


class SharedFolder(FolderTest):
    """A run folder that is fit on all nodes."""

    async def run(self, attempt_dir: Path, links: object, own_host: str) -> dict[str, Check]:
        return {}


HOSTS = ("n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8")


@pytest.mark.parametrize(
    ("blocks", "unfit", "absent", "used", "spares"),
    [
        ("12121212", "", "", "n1 n3 n5 n7 n2 n4", "n6 n8"),
        ("12121212", "n3", "", "n1 n6 n5 n7 n2 n4", "n8"),
        ("12121212", "n5 n4", "", "n1 n3 n6 n7 n2 n8", ""),
        ("12121212", "n8", "", "n1 n3 n5 n7 n2 n4", "n6"),
        ("11112222", "", "n3", "n1 n2 n7 n4 n5 n6", "n8"),
        ("11112222", "n6", "n2", "n1 n7 n3 n4 n5 n8", ""),
    ],
)
async def test_a_spare_takes_the_place_of_a_bad_host_in_the_order_of_blocks(
    tmp_path: Path, blocks: str, unfit: str, absent: str, used: str, spares: str
) -> None:
    """Two of the hosts are spares; ranks on fit hosts keep their places."""
    facts = {
        host: HostFacts(topology=(block,), problem="its agent failed" if host in unfit else None)
        for host, block in zip(HOSTS, blocks, strict=True)
        if host not in absent
    }

    async def own_facts(known: Facts, options: Options) -> HostFacts:
        return facts["n1"]

    head = Facts("n1", 0, HOSTS, "7", 0, in_slurm=True)
    options = Options(tmp_path, num_gpus=0, spare_nodes=2)
    gathering = Gathering(head, options, Joined(HOSTS, facts), read_host=own_facts)
    gathering._folder_test = SharedFolder()
    gathering.begin()
    await gathering.choose("10.0.0.1")
    assert (" ".join(gathering.used), " ".join(gathering.spares)) == (used, spares)
    if gathering.spares:  # and so does a spare that replaces a node later
        lost, spare = gathering.used[2], gathering.spares[0]
        gathering.replace(lost, spare)
        assert " ".join(gathering.used) == used.replace(lost, spare)
