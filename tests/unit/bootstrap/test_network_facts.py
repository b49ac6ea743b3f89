"""Invariant: hand-written or masked facts are read as far as possible; others are rejected by key."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.network.network_facts import FactsFileError, parse_facts


def test_numbers_in_quotes_and_an_address_that_is_no_list_are_read() -> None:
    row = {"name": "a", "state": "up", "ipv4": "10.0.0.1/24", "speed_mbps": "100000"}
    devices = [{"name": "d", "port": "1", "state": "ACTIVE", "rate_gbps": "400", "netdev": "a"}]
    facts = parse_facts({"interfaces": [row], "rdma_devices": devices, "gpus": {"count": "8"}})
    assert (facts.interfaces[0].ipv4, facts.interfaces[0].speed_mbps) == (("10.0.0.1/24",), 100_000)
    assert (facts.rdma_ports[0].rate_gbps, facts.rdma_ports[0].port, facts.num_gpus) == (
        400.0,
        1,
        8,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"default_route": "eth0"},
        {"gpus": {"count": "many"}},
        {"rdma_devices": [{"name": "d", "rate_gbps": [4]}]},
    ],
)
def test_facts_of_another_shape_are_refused_with_the_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(FactsFileError, match=r"default_route|count|rate_gbps"):
        parse_facts(wrong)


def test_masked_addresses_are_not_known_and_break_nothing() -> None:
    rows = [
        {"name": "a", "state": "up", "ipv4": ["10.x.x.4/24"], "ipv6": ["2001:db8::1/64"]},
        {"name": "b"},
    ]
    facts = parse_facts(
        {"interfaces": rows, "peers": {"example_peer": "n2.cluster", "slurm_addr": "10.x.0.1"}}
    )
    assert facts.interfaces[0].ipv4 is None and facts.interfaces[0].ipv6 == ("2001:db8::1/64",)
    assert (facts.example_peer, facts.slurm_addr) == (None, None)
