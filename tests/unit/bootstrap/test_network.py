"""Invariant: the interface is the one that owns the connection's address; every library is told it in its own way."""

import pytest

from bootstrap.network import (
    Address,
    NetworkError,
    ifname_of,
    ip_of,
    local_addresses,
    reachable_addresses,
    socket_environment,
)

ADDRESSES = (
    Address("lo", "127.0.0.1"),
    Address("docker0", "172.17.0.1"),
    Address("eth0", "10.77.0.11"),
    Address("eth1", "169.254.3.4"),
)


def test_the_interface_is_the_owner_of_the_address() -> None:
    assert ifname_of("10.77.0.11", ADDRESSES) == "eth0"
    assert ifname_of("127.0.0.2", ADDRESSES) == "lo"


def test_an_address_of_nobody_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(NetworkError, match=r"10\.0\.0\.9.*eth0=10\.77\.0\.11.*--socket-ifname"):
        ifname_of("10.0.0.9", ADDRESSES)


def test_an_interface_that_does_not_exist_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(NetworkError, match=r"ib7.*docker0, eth0"):
        ip_of("ib7", ADDRESSES)


def test_loopback_and_link_local_are_not_published() -> None:
    assert [address.ifname for address in reachable_addresses(ADDRESSES)] == ["docker0", "eth0"]


def test_this_machine_has_a_loopback_address() -> None:
    assert ip_of("lo", local_addresses()) == "127.0.0.1"


def test_gloo_takes_a_bare_name_and_nccl_an_exact_one() -> None:
    assert socket_environment("eth0", {}) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=eth0",
    }


def test_what_the_user_has_set_is_left_alone() -> None:
    assert "NCCL_SOCKET_IFNAME" not in socket_environment("eth0", {"NCCL_SOCKET_IFNAME": "ib"})
