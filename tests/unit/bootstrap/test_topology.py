"""Hosts of one block or switch become neighbours."""

from __future__ import annotations

from bootstrap.agent.topology import Path, by_topology, topology_path


def order(**paths: str) -> str:
    """Order hosts, in the order given, whose paths are texts such as ``s0.s1``."""
    split: dict[str, Path] = {host: tuple(path.split(".")) for host, path in paths.items() if path}
    return " ".join(by_topology(tuple(paths), split))


def test_an_address_is_read_with_its_pattern() -> None:
    def path(address: str, pattern: str) -> Path:
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


def test_hosts_without_an_address_come_last_but_the_head_stays_first() -> None:
    assert order(n1="b1", n2="", n3="b1") == "n1 n3 n2"
    assert order(n1="", n2="b2", n3="", n4="b2") == "n1 n2 n4 n3"
