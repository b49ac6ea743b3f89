"""Rules for interfaces above and below a port: switches, bonds, NICs of virtual machines; on hosts
of a few devices. Invariant: the interface that has the addresses and the port below it count as
one.
"""

from __future__ import annotations

import pytest

from bootstrap.network.detect import detect
from bootstrap.network.network_facts import Gid, Interface, NetworkFacts, parse_facts
from tests.unit.bootstrap.test_network_rules import host, names, nic, port

RAIL = nic("r", "192.168.0.1/24")


@pytest.mark.parametrize(
    "driver", ["openvswitch", None], ids=["by driver", "by the datapath's name"]
)
def test_a_bridge_of_open_vswitch_is_a_wire_and_its_port_the_front_end(driver: str | None) -> None:
    bridge = nic("e", "10.1.0.1/24", type="dummy", driver=driver)
    switch = Interface("ovs-system", "dummy", "down", (), (), driver=driver)
    inner = nic("g", type="vxlan", master="ovs-system")
    facts = host(
        switch,
        nic("x", master="ovs-system"),
        inner,
        bridge,
        RAIL,
        port("a", netdev="x"),
        port("s", netdev="r"),
    )
    found = detect(
        NetworkFacts(facts.interfaces, facts.rdma_ports, default_route="e"), override="e"
    )
    assert found.socket.ifname == "e" and names(found) == ["s"]
    assert not any("speed of the wire" in warning for warning in found.socket.warnings)


@pytest.mark.parametrize(
    "above", [{"type": "bond"}, {"type": "vlan", "parent": "x"}, {"parent": "x"}]
)
def test_the_gid_of_a_bare_port_is_that_of_what_lies_above_it(above: dict[str, str]) -> None:
    """A macvlan, a VLAN or a bond puts its addresses into the table of the port below."""
    top = nic("z", "10.1.0.1/24", **above)
    bottom = nic("x", "fe80::1/64", master="z" if above.get("type") == "bond" else None)
    assert detect(host(top, bottom, port("a", netdev="x"))).rdma.gid_index == 3
    gids = (Gid(3, "RoCE_v2", "::ffff:10.9.9.9"), Gid(5, "RoCE_v2", "::ffff:10.1.0.1"))
    assert detect(host(top, bottom, port("a", netdev="x", gids=gids))).rdma.gid_index == 5


def test_a_device_that_speaks_roce_v1_only_is_reported() -> None:
    gids = (Gid(0, "RoCE_v1", "fe80::1"), Gid(1, "RoCE_v1", "::ffff:10.0.0.1"))
    found = detect(host(port("a", gids=gids)))
    assert found.rdma.gid_index == 1 and any(
        "no RoCE v2 GID on a" in text for text in found.rdma.warnings
    )


def test_ways_into_a_routed_fabric_are_all_kept() -> None:
    """BGP unnumbered: the host's address is on a separate device, and the kernel shows one of
    several next hops.
    """
    ways = [nic("a", "fe80::1/64"), nic("b", "fe80::2/64")]
    facts = host(
        nic("y", "10.200.3.7/32", type="dummy"), *ways, port("p", netdev="a"), port("q", netdev="b")
    )
    found = detect(
        NetworkFacts(facts.interfaces, facts.rdma_ports, default_route="a"), override="y"
    )
    assert found.socket.ifname == "y" and names(found) == ["p", "q"]


def test_a_rail_of_infiniband_stays_one_though_the_default_route_leaves_over_it() -> None:
    """IPoIB may be the only network of a cluster."""
    rails = [nic(f"i{n}", f"10.{n}.0.1/16", type="infiniband") for n in range(4)]
    ports = [port(f"p{n}", "InfiniBand", netdev=f"i{n}") for n in range(4)]
    assert len(names(detect(host(*rails, *ports, default_route="i0", num_gpus=8)))) == 4


def test_the_port_of_the_default_route_stays_when_the_gpus_can_be_shared_out_only_with_it() -> None:
    wires = [nic(f"w{n}", f"10.9.{n}.1/24") for n in range(4)]
    ports = [port(f"p{n}", netdev=f"w{n}") for n in range(4)]
    assert len(names(detect(host(*wires, *ports, default_route="w0", num_gpus=8)))) == 4
    assert len(names(detect(host(*wires[:3], *ports[:3], default_route="w0", num_gpus=8)))) == 2
    slow = [port("p0", rate=100, netdev="w0"), *ports[1:]]
    assert names(detect(host(*wires, *slow, default_route="w0", num_gpus=8))) == ["p1", "p2", "p3"]


def test_the_accelerated_networking_of_a_virtual_machine_is_no_rdma() -> None:
    synthetic = nic("e", "10.0.0.4/24", driver="hv_netvsc")
    below = nic("x", master="e")
    alone = detect(host(synthetic, below, port("a", rate=50, netdev="x", sriov_vf=True)))
    assert (alone.rdma.kind, alone.to_document()["ib_hca"]) == (
        "none",
        [],
    ) and "NCCL_IB_HCA" not in alone.env
    rails = [port(f"r{n}", "InfiniBand", sriov_vf=True) for n in range(8)]
    assert (
        len(
            names(
                detect(
                    host(synthetic, below, port("a", None, None, netdev="x"), *rails, num_gpus=8)
                )
            )
        )
        == 8
    )


def test_virtual_functions_of_the_other_link_layer_are_not_what_physical_ports_make_superfluous() -> (
    None
):
    rails = [port(f"r{n}", "InfiniBand", sriov_vf=True) for n in range(8)]
    assert len(names(detect(host(port("a", rate=100), *rails, num_gpus=8)))) == 8


def test_a_card_is_known_by_all_its_ports_the_dead_ones_too() -> None:
    rails = [port(f"r{n}", "InfiniBand", pci=f"0000:{n:02x}:00.0") for n in range(8)]
    storage = [port(f"s{n}", "InfiniBand", pci=f"0000:a{n}:00.0") for n in range(2)]
    twins = [port(f"t{n}", rate=100, state="DOWN", pci=f"0000:a{n}:00.1") for n in range(2)]
    assert names(detect(host(*rails, *storage, *twins, num_gpus=8))) == [one.name for one in rails]


def test_nine_nics_of_the_cloud_are_tcpxo_when_its_plug_in_is_there() -> None:
    nics = [nic(f"g{n}", f"10.{n}.0.1/32", driver="gve") for n in range(9)]
    assert detect(host(*nics, num_gpus=8, default_route="g0")).rdma.kind == "none"
    found = detect(
        host(
            *nics,
            num_gpus=8,
            default_route="g0",
            hints=("GPUDirect-TCPXO plug-in in /var/lib/tcpxo/lib64",),
        ),
        override="g0",
    )
    assert found.rdma.kind == "gpudirect-tcpx" and found.env["NCCL_FASTRAK_CTRL_DEV"] == "g0"
    assert found.env["NCCL_FASTRAK_IFNAME"] == ",".join(f"g{n}" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "state"),
    [
        *((text, "ACTIVE") for text in ("ACTIVE", "4: ACTIVE", "PORT_ACTIVE")),
        *((text, "DOWN") for text in ("INIT", "2: INIT", "PORT_DOWN", "INACTIVE")),
        *((text, "unknown") for text in ("", "unknown")),
    ],
)
def test_a_port_s_state_is_read_as_any_tool_writes_it(text: str, state: str) -> None:
    facts = parse_facts({"rdma_devices": [{"name": "a", "state": text}]})
    assert facts.rdma_ports[0].state == state
