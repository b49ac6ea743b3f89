"""Invariant: exactly the values that differ from the majority are marked."""

from bootstrap.network.detect import detect
from bootstrap.network.network_facts import Interface, NetworkFacts, RdmaPort
from bootstrap.preflight.comparison import comparison_table, network_row


def row(host: str, **other: str) -> dict[str, str]:
    return {
        "interface": "eth0",
        "address": f"10.0.0.{host[1:]}",
        "MTU": "9000",
        "ray": "2.60.0",
    } | other


def test_the_odd_one_out_is_marked() -> None:
    rows = {host: row(host) for host in ("n1", "n2", "n3")}
    rows["n2"] = row("n2", MTU="1500")
    assert comparison_table(rows).splitlines() == [
        "host  interface  address   MTU    ray",
        "n1    eth0       10.0.0.1  9000   2.60.0",
        "n2    eth0       10.0.0.2  !1500  2.60.0",
        "n3    eth0       10.0.0.3  9000   2.60.0",
    ]


def test_equal_nodes_and_a_single_node_have_no_mark() -> None:
    assert "!" not in comparison_table({host: row(host) for host in ("n1", "n2", "n3", "n4")})
    assert "!" not in comparison_table({"n1": row("n1")})


def test_of_two_that_differ_both_are_marked() -> None:
    table = comparison_table({"n1": row("n1"), "n2": row("n2", ray="2.59.0")})
    assert "!2.60.0" in table and "!2.59.0" in table


def test_a_node_that_says_nothing_is_marked_as_such() -> None:
    assert (
        comparison_table({"n1": row("n1"), "n2": row("n2"), "n3": {}}).splitlines()[3].count("!-")
        == 3
    )


def test_a_row_says_what_was_decided() -> None:
    ports = tuple(
        RdmaPort(f"q{n}", state="ACTIVE", link_layer="InfiniBand", rate_gbps=400) for n in range(2)
    )
    facts = NetworkFacts((Interface("e", "ether", "up", ("10.0.0.1/24",), (), mtu=9000),), ports)
    assert network_row(
        facts, detect(facts, connection_ip="10.0.0.1"), {"ray": "2.60.0", "torch": None}
    ) == {
        "interface": "e",
        "address": "10.0.0.1",
        "MTU": "9000",
        "rdma": "ib",
        "HCAs": "2: q0 q1",
        "Gb/s": "400",
        "GID": "-",
        "ray": "2.60.0",
        "torch": "-",
    }
