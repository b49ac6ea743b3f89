"""Invariant: the interface is the one that owns the connection's address; each library gets it in
its own syntax.
"""

import json
import shutil
import socket
import subprocess
from types import SimpleNamespace

import pytest

from bootstrap.network import here as network
from bootstrap.network import host as network_host
from bootstrap.network.here import (
    NetworkError,
    ifname_of,
    ip_of,
    local_addresses,
    socket_environment,
)
from bootstrap.network.network_facts import Interface, NetworkFacts
from bootstrap.network.sockets import Address, published_addresses

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


BRIDGE = Interface("docker0", type="bridge")
OF_CONTAINER = Interface("veth1", type="veth", master="docker0")
ETH0, ETH1 = Interface("eth0"), Interface("eth1")


def published(*interfaces: Interface, ifname: str | None = None, **facts: str) -> list[str]:
    listed = NetworkFacts((*interfaces, ETH1), **facts)
    return [address.ifname for address in published_addresses(listed, ADDRESSES, ifname)]


def test_loopback_link_local_and_bridges_within_the_node_are_not_published() -> None:
    assert published(BRIDGE, OF_CONTAINER, ETH0) == published(BRIDGE, ETH0) == ["eth0"]


def test_a_bridge_that_leads_out_of_the_node_is_published() -> None:
    """By a wire, by the default route, by the user's word, or because there is nothing else."""
    both = ["docker0", "eth0"]
    assert published(BRIDGE, Interface("eth2", master="docker0"), ETH0) == both
    assert published(BRIDGE, ETH0, default_route="docker0") == both
    assert published(BRIDGE, ETH0, ifname="docker0") == ["docker0"]
    alone = (Address("lo", "127.0.0.1"), Address("docker0:1", "172.17.0.1"))
    assert published_addresses(NetworkFacts((BRIDGE,)), alone) == alone[1:]


def test_this_machine_has_a_loopback_address() -> None:
    assert ip_of("lo", local_addresses()) == "127.0.0.1"


@pytest.mark.skipif(shutil.which("ip") is None, reason="no ip (iproute2)")
def test_addresses_are_those_that_ip_shows() -> None:
    shown = subprocess.run(["ip", "-json", "address"], capture_output=True, text=True, check=True)
    for row in json.loads(shown.stdout):
        of_ip = {(one["family"], one["local"], one["prefixlen"]) for one in row["addr_info"]}
        ipv4, ipv6 = network_host._addresses(row["ifname"].partition("@")[0])
        families = [("inet", text) for text in ipv4] + [("inet6", text) for text in ipv6]
        assert of_ip == {
            (family, text.partition("/")[0], int(text.partition("/")[2]))
            for family, text in families
        }


def test_an_address_with_a_label_is_known_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ip address add ... label eth0:1``: the kernel lists it separately, without an interface of
    that name.
    """

    def address(ip: str, netmask: str) -> dict[int, list[dict[str, str]]]:
        return {socket.AF_INET: [{"addr": ip, "netmask": netmask}]}

    listed = {
        "eth0": address("10.1.0.5", "255.255.255.0"),
        "eth0:1": address("10.2.0.5", "255.255.0.0"),
        "eth1:1": address("10.3.0.5", "255.255.255.0"),
    }
    up = {"eth0": SimpleNamespace(isup=True), "eth1": SimpleNamespace(isup=False)}
    monkeypatch.setattr("netifaces.interfaces", lambda: list(listed))
    monkeypatch.setattr("netifaces.ifaddresses", lambda label: listed[label])
    monkeypatch.setattr("psutil.net_if_stats", lambda: up)
    assert local_addresses() == (Address("eth0", "10.1.0.5"), Address("eth0:1", "10.2.0.5"))
    assert ifname_of("10.2.0.5", local_addresses()) == "eth0:1"
    assert network_host._addresses("eth0") == (["10.1.0.5/24", "10.2.0.5/16"], [])


def test_gloo_takes_a_bare_name_and_nccl_an_exact_one() -> None:
    assert socket_environment("eth0", {}, "10.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "=eth0",
    }


def test_what_the_user_has_set_is_left_alone() -> None:
    assert "NCCL_SOCKET_IFNAME" not in socket_environment(
        "eth0", {"NCCL_SOCKET_IFNAME": "ib"}, "10.0.0.1"
    )


def test_the_command_prints_what_the_shell_s_variables_contradict(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    network.main(["--socket-ifname", "lo"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("conflict")]
    assert "NCCL_SOCKET_IFNAME=nosuch0" in line and "=lo" in line


def test_an_agent_warns_of_each_contradiction_once(monkeypatch, caplog):
    facts = NetworkFacts((Interface("eth0", state="up", ipv4=("10.0.0.1/24",)),))
    monkeypatch.setattr(network, "read_host", lambda: facts)
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "ib0")
    with caplog.at_level("INFO"):
        network.log_network_here("eth0", "10.0.0.1")
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2 and all("=ib0" in line and "eth0" in line for line in warned)
