"""Invariant: facts of a host agree with sysfs and procfs, also after they are saved and loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bootstrap.network import here as network
from bootstrap.network import host as network_host
from bootstrap.network.detect import detect
from bootstrap.network.network_facts import FactsFileError, load_facts, parse_facts

Tree = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A root folder of the given files; ``-> TARGET`` as text makes a link. Interfaces have no
    addresses.
    """
    monkeypatch.setattr(network_host, "_addresses", lambda name: ([], []))

    def plant(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                (tmp_path / text[3:]).mkdir(parents=True, exist_ok=True)
                path.symlink_to(tmp_path / text[3:])
            else:
                path.write_text(text + "\n")
        return tmp_path

    return plant


CARD = "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0"
HCA = "sys/class/infiniband/mlx5_3"


def test_an_rdma_port_is_read_with_its_gids_and_its_place_on_the_bus(tree: Tree) -> None:
    root = tree(
        {
            f"{HCA}/device": f"-> {CARD}",
            f"{CARD}/driver": "-> sys/bus/pci/drivers/mlx5_core",
            f"{CARD}/numa_node": "1",
            f"{HCA}/ports/1/state": "4: ACTIVE",
            f"{HCA}/ports/1/rate": "400 Gb/sec (4X NDR)",
            f"{HCA}/ports/1/link_layer": "Ethernet",
            f"{HCA}/ports/1/gids/0": "fe80:0000:0000:0000:0a2c:0dff:fe00:0001",
            f"{HCA}/ports/1/gid_attrs/types/0": "IB/RoCE v1",
            f"{HCA}/ports/1/gid_attrs/ndevs/0": "eth4",
            f"{HCA}/ports/1/gids/1": "0000:0000:0000:0000:0000:ffff:0a0c:0015",
            f"{HCA}/ports/1/gid_attrs/types/1": "RoCE v2",
            f"{HCA}/ports/1/gid_attrs/ndevs/1": "eth4",
            # of another network namespace
            f"{HCA}/ports/1/gids/2": "0000:0000:0000:0000:0000:ffff:0a0c:0016",
            f"{HCA}/ports/1/gids/3": "0000:0000:0000:0000:0000:0000:0000:0000",
        }
    )
    (port,) = parse_facts(network_host.read_document(root)).rdma_ports
    assert (port.name, port.port, port.state, port.link_layer) == (
        "mlx5_3",
        1,
        "ACTIVE",
        "Ethernet",
    )
    assert (port.rate_gbps, port.netdev, port.driver, port.numa) == (400, "eth4", "mlx5_core", 1)
    assert (
        port.pci_path == ("0000:15:01.0", "0000:16:00.0", "0000:17:00.0")
        and port.pci == port.pci_path[-1]
    )
    assert [(gid.index, gid.type, gid.addr) for gid in port.gids] == [
        (0, "RoCE_v1", "fe80::a2c:dff:fe00:1"),
        (1, "RoCE_v2", "::ffff:10.12.0.21"),
    ]


def test_a_device_counts_when_its_character_device_may_be_opened(tree: Tree) -> None:
    """sysfs of a container shows all devices of the node."""
    names = {"mlx5_0": "uverbs0", "mlx5_1": "uverbs1", "mlx5_2": None}
    files = {f"sys/class/infiniband/{name}/ports/1/state": "4: ACTIVE" for name in names}
    for name, node in names.items():
        if node is not None:
            files[f"sys/class/infiniband_verbs/{node}/ibdev"] = name
    root = tree({**files, "dev/infiniband/uverbs1": ""})
    ports = parse_facts(network_host.read_document(root)).rdma_ports
    assert [port.is_open for port in ports] == [False, True, True]  # nothing is known of the last


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED"])
def test_a_port_that_is_not_active_is_down(tree: Tree, state: str) -> None:
    root = tree({f"{HCA}/ports/1/state": state, f"{HCA}/ports/1/link_layer": "InfiniBand"})
    assert network_host.read_document(root)["rdma_devices"][0]["state"] == "DOWN"


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"type": "772"}, "loopback"),
        ({"type": "32"}, "infiniband"),
        ({"type": "1", "bonding/mode": "802.3ad 4"}, "bond"),
        ({"type": "1", "bridge/bridge_id": "8000"}, "bridge"),
        ({"type": "1", "uevent": "DEVTYPE=vlan\nINTERFACE=x"}, "vlan"),
        ({"type": "65534", "uevent": "DEVTYPE=wireguard"}, "tun"),
        ({"type": "1", "iflink": "7", "ifindex": "4"}, "veth"),
        ({"type": "1", "iflink": "4", "ifindex": "4"}, "dummy"),
        ({"type": "1", "iflink": "4", "ifindex": "4", "device/vendor": "0x15b3"}, "ether"),
        ({"type": "1", "uevent": "DEVTYPE=macvlan", "iflink": "2", "ifindex": "4"}, "ether"),
        # a team
        (
            {"type": "1", "iflink": "4", "ifindex": "4", "lower_p/master/ifindex": "4"},
            "bond",
        ),
        ({"type": "512"}, "tun"),
    ],
)
def test_the_kind_of_an_interface(tree: Tree, files: dict[str, str], kind: str) -> None:
    root = tree({f"sys/class/net/x/{name}": text for name, text in files.items()})
    assert network_host.read_document(root)["interfaces"][0]["type"] == kind


@pytest.mark.parametrize(
    ("operstate", "flags", "state"),
    [("up", "0x1003", "up"), ("down", "0x1003", "down"), ("unknown", "0x91", "up")],
)
def test_an_interface_without_carrier_detection_is_up_when_its_flag_is(
    tree: Tree, operstate: str, flags: str, state: str
) -> None:
    root = tree({"sys/class/net/x/operstate": operstate, "sys/class/net/x/flags": flags})
    assert network_host.read_document(root)["interfaces"][0]["state"] == state


def test_the_default_route_is_that_of_the_lowest_metric_and_ipv4_before_ipv6(tree: Tree) -> None:
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    nothing = "0" * 32
    root = tree(
        {
            "proc/net/route": f"{head}\nslow 00000000 010200C0 0003 0 0 600 00000000 0 0 0\n"
            "fast 00000000 010300C0 0003 0 0 100 00000000 0 0 0\nnear 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0",
            "proc/net/ipv6_route": f"{nothing} 00 {nothing} 00 {nothing} 00000400 00000001 00000000 00000003 six",
        }
    )
    assert network_host.default_route(root) == "fast"
    equal = "late 00000000 010200C0 0003 0 0 9 00000000 0 0 0\nearly 00000000 010200C0 0003 0 0 9 00000000 0 0 0"
    (root / "proc/net/route").write_text(f"{head}\n{equal}")
    # the kernel takes the first it lists, whatever its name
    assert network_host.default_route(root) == "late"
    (root / "proc/net/route").write_text(head)
    assert network_host.default_route(root) == "six"


def test_gpus_are_counted_by_their_class(tree: Tree) -> None:
    devices = {
        "0": ("0x10de", "0x030200"),
        "1": ("0x10de", "0x030000"),
        "2": ("0x1a03", "0x030000"),
    }
    devices |= {"3": ("0x1002", "0x120000"), "4": ("0x15b3", "0x020000")}
    files = {f"sys/bus/pci/devices/{name}/vendor": vendor for name, (vendor, _) in devices.items()}
    files |= {f"sys/bus/pci/devices/{name}/class": kind for name, (_, kind) in devices.items()}
    assert network_host.read_document(tree(files))["gpus"]["count"] == 3


def test_a_missing_kernel_module_and_a_missing_library_are_warned_of(tree: Tree) -> None:
    root = tree({"sys/bus/pci/devices/0/class": "0x020700"})
    assert "mlx5_ib" in detect(parse_facts(network_host.read_document(root))).rdma.warnings[0]
    root = tree({f"{HCA}/ports/1/state": "4: ACTIVE", f"{HCA}/ports/1/link_layer": "InfiniBand"})
    warnings = " ".join(detect(parse_facts(network_host.read_document(root))).rdma.warnings)
    assert "libibverbs" in warnings and "/dev/infiniband" in warnings


def test_saved_facts_lead_to_the_same_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "facts.yaml"
    assert network.main(["--save", str(saved), "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert network.main(["--facts", str(saved), "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert {key: there[key] for key in ("socket_ifname", "node_ip", "rdma", "why")} == {
        key: here[key] for key in ("socket_ifname", "node_ip", "rdma", "why")
    }
    assert load_facts(saved).interfaces and saved.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n", "list"),
        ("a: [", "neither YAML nor JSON"),
        ("schema: netlayout/9\n", "netlayout/9"),
        (None, "read"),
    ],
)
def test_a_file_that_is_no_layout_is_named(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FactsFileError, match=rf"x\.yaml.*{complaint}"):
        load_facts(path)


def test_a_connection_needs_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        network.main(["--connection-ip", "eth0"])
    assert "--connection-ip: invalid ip_address value: 'eth0'" in capsys.readouterr().err


def test_facts_of_another_host_cannot_be_saved_as_this_ones(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        network.main(["--facts", str(tmp_path / "a"), "--save", str(tmp_path / "b")])


def test_the_plug_in_of_tcpxo_is_told_by_the_folder_that_a_prolog_fills(tree: Tree) -> None:
    """Nine gVNICs as on an A3 Mega: without the plug-in they are ordinary NICs."""
    nics = {f"sys/class/net/g{n}/device/driver": "-> sys/bus/pci/drivers/gve" for n in range(9)}
    nics |= {f"sys/class/net/g{n}/operstate": "up" for n in range(9)}
    gpus = {f"sys/bus/pci/devices/0000:0{n}:00.0/vendor": "0x10de" for n in range(8)}
    gpus |= {f"sys/bus/pci/devices/0000:0{n}:00.0/class": "0x030200" for n in range(8)}
    root = tree({**nics, **gpus})
    assert detect(parse_facts(network_host.read_document(root))).rdma.kind == "none"
    tree({"var/lib/tcpxo/lib64/libnccl-net.so": ""})
    assert detect(parse_facts(network_host.read_document(root))).rdma.kind == "gpudirect-tcpx"
