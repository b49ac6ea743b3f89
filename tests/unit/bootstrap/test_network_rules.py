"""Each rule of detection separately, on hosts of a few devices; invariant: evidence of higher
precedence wins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bootstrap.network.detect import Detection, detect
from bootstrap.network.network_facts import Gid, GpuLocation, Interface, NetworkFacts, RdmaPort

LO = Interface("lo", "loopback", "up", ("127.0.0.1/8",), ("::1/128",))


def nic(name: str, *addresses: str, **more: Any) -> Interface:
    """An Ethernet interface that is up, with only these addresses."""
    ipv4 = tuple(text for text in addresses if ":" not in text)
    ipv6 = tuple(text for text in addresses if ":" in text)
    return Interface(
        **{"name": name, "type": "ether", "state": "up", "ipv4": ipv4, "ipv6": ipv6, **more}
    )


def port(
    name: str, layer: str | None = "Ethernet", rate: float | None = 400, **more: Any
) -> RdmaPort:
    return RdmaPort(
        **{"name": name, "state": "ACTIVE", "link_layer": layer, "rate_gbps": rate, **more}
    )


def host(*devices: Interface | RdmaPort, **more: Any) -> NetworkFacts:
    interfaces = tuple(one for one in devices if isinstance(one, Interface))
    return NetworkFacts(
        (LO, *interfaces), tuple(one for one in devices if isinstance(one, RdmaPort)), **more
    )


def names(found: Detection) -> list[str]:
    return [one.name for one in found.rdma.ports]


def used(*devices: Interface | RdmaPort, **more: Any) -> list[str]:
    """The RDMA ports that are used on such a host."""
    return names(detect(host(*devices, **more)))


MANAGEMENT = nic("m", "10.1.0.5/24", speed_mbps=1_000)
FAST = nic("f", "10.9.0.5/24", speed_mbps=100_000)


# Sockets
# ------------------------------------------------------------------------------------------------------------


def test_the_user_outranks_the_connection_and_without_both_the_addresses_are_listed() -> None:
    facts = host(MANAGEMENT, FAST, default_route="m")
    found = detect(facts)
    assert found.socket.ifname is None and "GLOO_SOCKET_IFNAME" not in found.env
    assert "these addresses of this host: m=10.1.0.5, f=10.9.0.5" in " ".join(found.socket.why)
    met = detect(facts, connection_ip="10.9.0.5")
    assert (met.socket.ifname, met.socket.ip) == ("f", "10.9.0.5")
    assert detect(facts, connection_ip="10.9.0.5", override="m").socket.ifname == "m"
    missing = detect(facts, override="zz9")
    assert missing.socket.ifname == "zz9" and "zz9" in missing.socket.warnings[0]


def test_dead_interfaces_and_bridges_within_the_node_are_not_listed() -> None:
    facts = host(
        nic("b", "169.254.3.4/16"),
        nic("d", "10.8.0.1/24", state="down"),
        nic("e", "172.17.0.1/16", type="bridge"),
        nic("z", "10.4.0.1/24", type="bond"),
    )
    assert detect(facts).socket.why[0].endswith(": z=10.4.0.1")
    assert detect(host()).socket.why[0].endswith(": none")


def test_a_second_interface_in_one_network_and_a_tunnel_are_warned_of() -> None:
    slow, fast = nic("s", "10.2.0.5/20"), nic("t", "10.2.2.5/20")
    assert "one network" in detect(host(slow, fast), override="s").socket.warnings[0]
    overlay = detect(host(nic("v", "100.80.1.2/32", type="tun")), connection_ip="100.80.1.2")
    assert "not at the speed of the wire" in overlay.socket.warnings[0]


def test_an_address_that_no_interface_holds_is_warned_of() -> None:
    facts = host(nic("a", "10.0.0.1/24"))
    found = detect(facts, connection_ip="10.99.0.1").socket
    (warning,) = found.warnings
    assert found.ifname is None and warning.startswith("--connection-ip 10.99.0.1 is no address")
    assert not detect(facts).socket.warnings
    assert not detect(facts, connection_ip="10.0.0.1").socket.warnings


def test_an_address_on_loopback_is_warned_of() -> None:
    lo = replace(LO, ipv4=("127.0.0.1/8", "10.200.0.7/32"))
    found = detect(NetworkFacts((lo, nic("a", "fe80::1/64"))), connection_ip="10.200.0.7")
    assert found.socket.ifname == "lo" and "need it named" in found.socket.warnings[0]


def test_a_host_with_ipv6_only_says_so_to_nccl() -> None:
    found = detect(host(nic("v", "fe80::1/64", "fd00:5::2/64", type="veth")), override="v")
    assert (found.socket.ifname, found.socket.ip) == ("v", "fd00:5::2")
    assert found.env["NCCL_SOCKET_FAMILY"] == "AF_INET6" and found.env["NCCL_SOCKET_IFNAME"] == "=v"


def test_the_address_of_a_named_interface_is_no_floating_one() -> None:
    several = nic("a", "10.7.0.250/32", "10.8.0.2/24", "10.9.0.2/24")
    assert detect(host(several), override="a").socket.ip == "10.8.0.2"


# RDMA
# ---------------------------------------------------------------------------------------------------------------


def test_dead_ports_are_left_out_whatever_their_interface_says() -> None:
    facts = host(
        nic("i", type="infiniband", state="down"),
        port("a", "InfiniBand", netdev="i"),
        port("b", "InfiniBand", state="DOWN"),
    )
    found = detect(facts)
    assert (found.rdma.kind, names(found)) == ("ib", ["a"]) and "b" in found.rdma.warnings[0]
    all_dead = detect(host(port("a", state="DOWN")))
    assert all_dead.rdma.kind == "none" and "down" in all_dead.rdma.warnings[0]


def test_a_port_whose_device_cannot_be_opened_is_none() -> None:
    open_port, closed = port("a"), port("b", is_open=False)
    found = detect(host(open_port, closed))
    assert names(found) == ["a"] and "cannot be opened: b" in " ".join(found.rdma.warnings)
    without = detect(host(closed)).rdma
    assert (without.kind, without.ports) == ("none", ()) and "/dev/infiniband" in without.warnings[
        0
    ]


def test_of_a_device_with_two_ports_the_living_one_is_used() -> None:
    found = detect(
        host(
            port("a", "InfiniBand"),
            port("a", "InfiniBand", port=2, state="DOWN"),
            port("b", rate=25),
        )
    )
    assert (found.to_document()["ib_hca"], found.to_document()["ib_hca_exclude"]) == (["a"], ["b"])
    assert found.env["NCCL_IB_HCA"] == "=a:1"


@pytest.mark.parametrize(
    ("infiniband", "ethernet", "kind"),
    [
        ([400] * 8, [100, 100], "ib"),
        ([100], [400] * 8, "roce"),  # InfiniBand for storage beside RoCE rails
        ([200], [25], "ib"),
        ([200], [200], "ib"),
        ([None] * 8, [None], "ib"),
        ([None], [None] * 8, "roce"),  # the number of GPUs decides
    ],
)
def test_one_link_layer_is_kept(
    infiniband: list[float | None], ethernet: list[float | None], kind: str
) -> None:
    ports = [port(f"i{n}", "InfiniBand", rate) for n, rate in enumerate(infiniband)]
    ports += [port(f"e{n}", "Ethernet", rate) for n, rate in enumerate(ethernet)]
    found = detect(host(*ports, num_gpus=8))
    assert found.rdma.kind == kind
    assert {name[0] for name in names(found)} == {"i" if kind == "ib" else "e"}
    assert found.env["NCCL_IB_HCA"].startswith("=") and found.env["UCX_NET_DEVICES"]


def test_ports_of_another_rate_are_left_out_by_bandwidth_in_all() -> None:
    rails = [port(f"r{n}", rate=200) for n in range(8)]
    assert len(used(*rails, port("s", rate=400), port("t", rate=25))) == 8
    assert used(port("a", rate=100), port("b", rate=400)) == ["b"]


@pytest.mark.parametrize("vendor", ["bnxt_re", "irdma", "ionic_rdma", "mlx5_core"])
def test_the_port_of_the_default_route_is_the_front_end(vendor: str) -> None:
    facts = host(
        nic("x", "10.1.0.1/24"),
        nic("y", "192.168.0.1/24"),
        port("a", netdev="x", driver=vendor),
        port("b", netdev="y", driver=vendor),
        default_route="x",
    )
    found = detect(facts)
    assert names(found) == ["b"] and [one.name for one in found.rdma.excluded] == ["a"]
    alone = detect(replace(facts, rdma_ports=facts.rdma_ports[:1]))
    # all active ports: NCCL's own choice is right
    assert names(alone) == ["a"] and "NCCL_IB_HCA" not in alone.env


def test_a_port_under_the_bond_of_the_default_route_is_the_front_end() -> None:
    bond, member = nic("z", "10.1.0.1/24", type="bond"), nic("x", master="z")
    rails = [port(f"r{n}") for n in range(8)]
    assert (
        len(used(bond, member, port("a", netdev="x"), *rails, default_route="z", num_gpus=8)) == 8
    )
    assert len(used(bond, member, port("a", netdev="x"), *rails)) == 8


@pytest.mark.parametrize(
    "stack",
    [
        (nic("z.7", "10.1.0.1/24", type="vlan"), nic("z", type="bond"), nic("x", master="z")),
        (
            nic("t", "10.1.0.1/24", type="vlan", parent="z"),
            nic("z", type="bond"),
            nic("x", master="z"),
        ),
        (
            nic("b", "10.1.0.1/24", type="bridge"),
            nic("z", type="bond", master="b"),
            nic("x", master="z"),
        ),
        (
            nic("o", "10.1.0.1/24", type="bond"),
            nic("z", type="bond", master="o"),
            nic("x", master="z"),
        ),
    ],
    ids=["VLAN on a bond", "VLAN of any name", "bridge over a bond", "bond of bonds"],
)
@pytest.mark.parametrize("where", ["x", "z"])
def test_a_port_at_the_bottom_of_a_stack_is_the_front_end_too(
    stack: tuple[Interface, ...], where: str
) -> None:
    rail = nic("r", "192.168.0.1/24")
    found = detect(
        host(
            *stack,
            rail,
            port("a", netdev=where),
            port("s", netdev="r"),
            default_route=stack[0].name,
        ),
        connection_ip="10.1.0.1",
    )
    assert found.socket.ifname == stack[0].name and names(found) == ["s"]


def test_the_only_fast_port_is_kept_though_the_default_route_leaves_through_it() -> None:
    facts = host(
        nic("x", "10.1.0.1/24"),
        port("a", rate=400, netdev="x"),
        port("b", rate=25),
        default_route="x",
    )
    assert names(detect(facts)) == ["a"]


def test_virtual_functions_count_only_where_there_is_nothing_else() -> None:
    virtual = port("v", sriov_vf=True)
    assert used(virtual, port("p")) == ["p"]
    assert used(virtual) == ["v"]
    # a pod has this one; it sees its host's ports, not their interfaces
    given = port("v", sriov_vf=True, netdev="n")
    assert used(nic("n", "10.3.0.1/24"), given, port("p"), port("q", netdev="elsewhere")) == ["v"]


def test_ports_whose_interface_is_in_another_namespace_are_left_out_with_a_warning() -> None:
    """SR-IOV: the container has two virtual functions of a NIC and sees the RDMA devices of all
    four.
    """
    own = [port(f"mlx5_{n}", sriov_vf=True, netdev=f"net{n}") for n in (1, 2)]
    foreign = [port("mlx5_3", sriov_vf=True), port("mlx5_4", sriov_vf=True, netdev="eth4")]
    here = [nic("net1", "10.1.0.5/24"), nic("net2", "10.2.0.5/24")]
    found = detect(host(*here, *own, *foreign, interfaces_complete=True))
    assert names(found) == ["mlx5_1", "mlx5_2"] and found.rdma.kind == "roce"
    (warning,) = [line for line in found.rdma.warnings if "another network namespace" in line]
    assert "mlx5_3, mlx5_4 (eth4); left out" in warning
    pasted = detect(host(*here, *own, *foreign))  # an excerpt lacks interfaces that are there
    assert names(pasted) == ["mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4"] and not pasted.rdma.warnings


def test_a_port_with_an_address_of_an_interface_here_is_no_port_of_elsewhere() -> None:
    """A pod's macvlan over the host's interface: the port's own interface is the host's, and its
    GIDs include the pod's.
    """
    gids = (Gid(0, "RoCE_v2", "fe80::1"), Gid(5, "RoCE_v2", "::ffff:10.1.0.5"))
    shared = [port("a", netdev="eth2", gids=gids), port("b", netdev="net2")]
    found = detect(
        host(
            nic("net1", "10.1.0.5/24"),
            nic("net2", "10.2.0.5/24"),
            *shared,
            interfaces_complete=True,
        )
    )
    assert names(found) == ["a", "b"] and not found.rdma.warnings


def test_a_device_that_never_shows_an_interface_is_no_port_of_elsewhere() -> None:
    erdma = [port(f"erdma_{n}", driver="erdma") for n in range(2)]
    found = detect(host(nic("eth0", "10.0.0.2/16"), *erdma, interfaces_complete=True))
    assert names(found) == ["erdma_0", "erdma_1"] and not found.rdma.warnings


def test_where_all_interfaces_are_elsewhere_the_ports_are_kept_with_a_warning() -> None:
    found = detect(
        host(nic("eth0", "172.17.0.2/16"), port("a"), port("b"), interfaces_complete=True)
    )
    assert names(found) == ["a", "b"]
    assert any("a, b; kept, for there are no others" in line for line in found.rdma.warnings)


def test_infiniband_needs_no_interface() -> None:
    found = detect(
        host(nic("eth0", "10.0.0.2/16"), port("a", "InfiniBand"), interfaces_complete=True)
    )
    assert names(found) == ["a"] and not found.rdma.warnings


def test_storage_ports_of_the_same_kind_and_rate_show_by_their_card() -> None:
    rails = [port(f"r{n}", "InfiniBand", 200, pci=f"0000:{n:02x}:00.0") for n in range(8)]
    storage = [port(f"s{n}", "InfiniBand", 200, pci=f"0000:e1:00.{n}") for n in range(2)]
    assert used(*rails, *storage, num_gpus=8) == [one.name for one in rails]
    assert len(used(*rails, *storage)) == 10  # nobody counted the GPUs


def test_ports_on_the_switch_of_a_gpu_are_compute() -> None:
    gpus = tuple(
        GpuLocation(0, (f"0000:{n}0:01.0", f"0000:{n}1:00.0", f"0000:{n}3:00.0")) for n in range(4)
    )
    near = [
        port(f"n{n}", pci_path=(f"0000:{n}0:01.0", f"0000:{n}1:00.0", f"0000:{n}4:00.0"))
        for n in range(4)
    ]
    far = [port(f"n{n + 4}", pci_path=(f"0000:{n}9:01.0", f"0000:{n}a:00.0")) for n in range(4)]
    assert used(*near, *far, num_gpus=4, gpus=gpus) == ["n0", "n1", "n2", "n3"]
    assert len(used(*far, num_gpus=4, gpus=gpus)) == 4
    # one GPU would have no port
    assert len(used(*near[1:], *far, num_gpus=4, gpus=gpus)) == 7


def test_ports_on_a_numa_node_without_gpu_are_left_out() -> None:
    ports = [port("a", numa=0), port("b", numa=1), port("c", numa=3)]
    assert used(*ports, num_gpus=2, gpus=(GpuLocation(0), GpuLocation(1))) == [
        "a",
        "b",
    ]


def test_where_nodes_meet_over_rdma_a_port_elsewhere_is_left_out() -> None:
    here, twin = nic("x", "10.100.4.1/24"), nic("y", "10.100.5.1/24")
    elsewhere, auto = nic("u", "10.0.0.2/24"), nic("w", "169.254.1.2/16")
    ports = [port(f"p{one.name}", netdev=one.name) for one in (here, twin, elsewhere, auto)]
    found = detect(
        host(here, twin, elsewhere, auto, *ports, num_gpus=1), connection_ip="10.100.4.1"
    )
    assert names(found) == ["px", "py"]


def test_rails_with_a_plan_of_their_own_outvote_the_place_where_nodes_meet() -> None:
    front = nic("x", "10.0.2.51/24")
    rails = [nic(f"r{n}", f"192.168.{n}.9/24") for n in range(8)]
    ports = [port(f"p{one.name}", netdev=one.name) for one in (front, *rails)]
    found = detect(host(front, *rails, *ports), connection_ip="10.0.2.51")
    assert len(names(found)) == 8 and "px" not in names(found)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (host(nic("e", driver="ena"), port("r", None, driver="efa")), "efa"),
        # rdma-core: neither InfiniBand nor Ethernet
        (
            host(FAST, port("rdmap86s0", None, None)),
            "efa",
        ),
        (host(FAST, port("rdmap86s0", "Ethernet")), "roce"),
        (host(FAST, port("cxi0", None, None)), "cxi"),
        (host(FAST, hints=("libfabric provider cxi (class cxi)",)), "cxi"),
        (
            host(*(nic(f"g{n}", f"10.{n}.0.1/32", driver="gve") for n in range(5)), num_gpus=8),
            "gpudirect-tcpx",
        ),
        (
            host(*(nic(f"g{n}", f"10.{n}.0.1/32", driver="gve") for n in range(2)), num_gpus=8),
            "none",
        ),
        (host(nic("i", "10.3.0.1/24", type="infiniband")), "ib"),
        (host(FAST, hints=("no RDMA device although lspci shows mlx5 cards",)), "none"),
        (host(FAST), "none"),
    ],
)
def test_fabrics_that_are_no_verbs_are_told_by_driver_or_provider(
    facts: NetworkFacts, kind: str
) -> None:
    found = detect(facts)
    assert found.rdma.kind == kind
    assert not any(key.startswith(("NCCL_IB", "UCX")) for key in found.env)
    is_libfabric = kind in ("efa", "cxi")
    assert found.env.get("FI_PROVIDER") == (kind if is_libfabric else None)
    assert found.env.get("NCCL_NET") == ("AWS Libfabric" if is_libfabric else None)


def test_tcpx_keeps_control_and_data_apart() -> None:
    nics = [nic(f"g{n}", f"10.{n}.0.1/32", driver="gve") for n in range(5)]
    found = detect(host(*nics, num_gpus=8, default_route="g0"), connection_ip="10.0.0.1")
    assert found.env["NCCL_GPUDIRECTTCPX_CTRL_DEV"] == "g0"
    assert found.env["NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"] == "g1,g2,g3,g4"
    assert found.rdma_env.keys() == {
        "NCCL_GPUDIRECTTCPX_CTRL_DEV",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME",
    }


# GIDs
# ---------------------------------------------------------------------------------------------------------------

LINK_LOCAL = (Gid(0, "RoCE_v1", "fe80::1"), Gid(1, "RoCE_v2", "fe80::1"))


@pytest.mark.parametrize(
    ("gids", "index", "to_nccl"),
    [
        (
            (
                *LINK_LOCAL,
                Gid(2, "RoCE_v1", "::ffff:10.0.0.1"),
                Gid(3, "RoCE_v2", "::ffff:10.0.0.1"),
            ),
            3,
            False,
        ),
        (
            (
                *LINK_LOCAL,
                Gid(4, "RoCE_v1", "::ffff:10.0.0.1"),
                Gid(5, "RoCE v2", "::ffff:10.0.0.1"),
            ),
            5,
            False,
        ),
        (
            (
                *LINK_LOCAL,
                Gid(3, "RoCE_v2", "::ffff:169.254.0.1"),
                Gid(7, "RoCE_v2", "::ffff:10.0.0.1"),
            ),
            7,
            False,
        ),
        ((*LINK_LOCAL, Gid(3, "RoCE_v2", "fd00::1")), 3, True),
        (LINK_LOCAL, 1, True),
    ],
)
def test_the_gid_is_read_off_the_table(gids: tuple[Gid, ...], index: int, to_nccl: bool) -> None:
    found = detect(host(port("a", gids=gids)))
    assert found.rdma.gid_index == index and found.env["NVSHMEM_IB_GID_INDEX"] == str(index)
    assert ("NCCL_IB_GID_INDEX" in found.env) == to_nccl  # it finds IPv4 by itself since 2.21


def test_a_gid_of_the_ports_own_interface_is_preferred() -> None:
    gids = (Gid(3, "RoCE_v2", "::ffff:10.9.9.9"), Gid(13, "RoCE_v2", "::ffff:10.5.0.1"))
    assert (
        detect(host(nic("x", "10.5.0.1/24"), port("a", netdev="x", gids=gids))).rdma.gid_index == 13
    )


def test_gids_that_differ_by_device_are_reported_and_none_is_set() -> None:
    ports = [port(f"p{n}", gids=(Gid(n, "RoCE_v2", "::ffff:10.0.0.1"),)) for n in (1, 2)]
    found = detect(host(*ports))
    assert found.rdma.gid_index is None and found.rdma.gid_index_per_hca == {"p1": 1, "p2": 2}
    assert found.rdma.warnings and not any("GID" in key for key in found.env)


def test_without_a_table_the_kernels_order_is_assumed_and_nothing_is_set() -> None:
    for addresses, index in (
        (("10.0.0.1/24",), 3),
        (("fe80::1/64",), 1),
        (("fd00::1/64", "fe80::1/64"), 3),
    ):
        found = detect(host(nic("x", *addresses), port("a", netdev="x")))
        assert found.rdma.gid_index == index and not any("GID" in key for key in found.env)


def test_infiniband_has_no_gid_index() -> None:
    assert (
        detect(host(port("a", "InfiniBand", gids=(Gid(0, "IB", "fe80::1"),)))).rdma.gid_index
        is None
    )


# What the user and the site say
# -------------------------------------------------------------------------------------


def test_what_the_site_prescribes_is_kept_and_said() -> None:
    facts = host(FAST, port("a", "InfiniBand"), port("b", "InfiniBand", 100))
    site = {
        "NCCL_IB_TC": "106",
        "UCX_TLS": "rc",
        "NCCL_IB_HCA": "mlx5",
        "NCCL_SOCKET_IFNAME": "",
        "PATH": "/bin",
    }
    found = detect(facts, override="f", environ=site)
    assert (
        found.env["NCCL_IB_TC"] == "106"
        and found.env["UCX_TLS"] == "rc"
        and found.env["NCCL_IB_HCA"] == "mlx5"
    )
    assert "site" in found.settings["NCCL_IB_HCA"].reason
    assert found.env["NCCL_SOCKET_IFNAME"] == "=f" and "PATH" not in found.env


ROCE_PORTS = (
    port(
        "mlx5_0",
        netdev="r",
        gids=(Gid(2, "RoCE_v1", "::ffff:10.5.0.1"), Gid(3, "RoCE_v2", "::ffff:10.5.0.1")),
    ),
    port("mlx5_1", rate=25),
)


@pytest.mark.parametrize(
    ("site", "name", "detected"),
    [
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME", "=f"),
        ({"NCCL_SOCKET_IFNAME": "^f,lo"}, "NCCL_SOCKET_IFNAME", "=f"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "GLOO_SOCKET_IFNAME", "f"),
        ({"NCCL_IB_HCA": "mlx5"}, "NCCL_IB_HCA", "=mlx5_0:1"),
        ({"NCCL_IB_HCA": "=mlx5_7"}, "NCCL_IB_HCA", "=mlx5_0:1"),
        ({"NCCL_IB_GID_INDEX": "1"}, "NCCL_IB_GID_INDEX", "3"),
        ({"UCX_NET_DEVICES": "mlx5_9:1"}, "UCX_NET_DEVICES", "mlx5_0:1,f"),
    ],
)
def test_a_value_that_the_host_contradicts_is_kept_and_named(
    site: dict[str, str], name: str, detected: str
) -> None:
    facts = host(FAST, nic("r", "10.5.0.1/24"), *ROCE_PORTS)
    found = detect(facts, override="f", environ=site)
    (conflict,) = found.conflicts
    assert (conflict.name, conflict.given, conflict.detected) == (name, site[name], detected)
    assert found.env[name] == site[name], "what the site says still wins"
    line = str(conflict)
    assert "\n" not in line and all(
        word in line for word in (f"{name}={site[name]}", detected, conflict.source)
    )
    assert found.to_document()["conflicts"] == [line]


@pytest.mark.parametrize(
    "site",
    [
        {"NCCL_SOCKET_IFNAME": "^docker,lo,veth", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "f"},
        {"NCCL_SOCKET_IFNAME": "=f", "GLOO_SOCKET_IFNAME": "f", "TP_SOCKET_IFNAME": "f"},
        {"NCCL_IB_HCA": "=mlx5_0"},
        {"NCCL_IB_HCA": "^mlx5_1"},
        {"NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "106", "NCCL_IB_TIMEOUT": "22"},
        {"NCCL_IB_GID_INDEX": "-1"},
        {"NCCL_IB_HCA": ""},
    ],
)
def test_the_same_in_other_words_is_no_contradiction(site: dict[str, str]) -> None:
    facts = host(FAST, nic("r", "10.5.0.1/24"), *ROCE_PORTS)
    assert detect(facts, override="f", environ=site).conflicts == ()


def test_a_host_without_rdma_says_nothing_against_variables_of_rdma() -> None:
    site = {"NCCL_IB_HCA": "mlx5_0", "NCCL_IB_GID_INDEX": "3"}
    assert detect(host(FAST), environ=site).conflicts == ()
