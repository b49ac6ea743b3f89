"""Invariant: hand-written or masked facts are read as far as possible; others are rejected by key."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.links.identity import FactsError, read_facts
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
    facts = parse_facts({"interfaces": rows})
    assert facts.interfaces[0].ipv4 is None and facts.interfaces[0].ipv6 == ("2001:db8::1/64",)


def test_a_broken_host_list_is_refused_with_its_variable() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[a-b]"}
    with pytest.raises(FactsError, match="SLURM_JOB_NODELIST: host list"):
        read_facts(environ, "whatever")


def test_the_step_counts_and_not_the_job() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NODELIST": "n[01-04]",
        "SLURM_STEP_NODELIST": "n[02-03]",
        "SLURM_RESTART_COUNT": "2",
    }
    facts = read_facts(environ, "whatever")
    assert (facts.host, facts.head_host, facts.is_head, facts.restart_count) == (
        "n03",
        "n02",
        False,
        2,
    )


def test_outside_slurm_there_is_one_node() -> None:
    facts = read_facts({}, "laptop")
    assert facts.hosts == ("laptop",) and facts.is_head and not facts.in_slurm


def test_an_agent_started_by_hand_inside_a_job_is_told_to_use_srun() -> None:
    with pytest.raises(FactsError, match="srun"):
        read_facts({"SLURM_JOB_ID": "7"}, "n01")
