"""Facts about network interfaces, compared with iproute2 on interfaces that the kernel creates, and
the head's table of all nodes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.attempts import Attempt
from tests.cluster.lab import Lab

ROOT = Path(__file__).parents[2]

# In a new network namespace with a new sysfs: all interfaces disappear when the shell ends.
SCRIPT = """
set -e
mount -t sysfs none /sys
ip link set lo up
for name in end bridged; do ip link add $name type veth peer name ${name}_far; done
ip link add name bridge0 type bridge
ip link set bridged master bridge0
ip link add name vx type vxlan id 7 dstport 4789 local 10.0.0.1
ip tuntap add mode tun name tun
ip addr add 10.5.0.2/20 dev end
ip addr add fd00:5::2/64 dev end nodad
ip addr add 10.6.0.2/24 dev bridge0
for name in end end_far bridged bridged_far bridge0 tun; do ip link set $name up; done
ip link set end mtu 1400
for name in end bridged bridge0; do  # the kernel reports the state with a delay
    until [ "$(cat /sys/class/net/$name/operstate)" = up ]; do sleep 0.05; done
done
ip route add default via 10.5.0.1 dev end metric 7
"$PYTHON" -m bootstrap.network --save "$OUT/facts.yaml" --json > "$OUT/unconnected.json"
"$PYTHON" -m bootstrap.network --connection-ip 10.5.0.2 --json > "$OUT/answer.json"
ip -json -details address > "$OUT/ip.json"
ip addr del 10.5.0.2/20 dev end
ip addr del 10.6.0.2/24 dev bridge0
"$PYTHON" -m bootstrap.network --connection-ip fd00:5::2 --json > "$OUT/ipv6.json"
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The files facts, unconnected, answer, ip and ipv6 of SCRIPT, parsed."""
    out = tmp_path_factory.mktemp("network")
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.executable, "OUT": str(out)}
    command = ["unshare", "--net", "--mount", "bash", "-c", SCRIPT]
    subprocess.run(command, cwd=ROOT, env=environ, check=True, timeout=120)
    return {path.stem: json.loads(path.read_text()) for path in out.iterdir()}


def test_kind_state_mtu_and_addresses_are_those_of_iproute2(seen: dict[str, list[dict]]) -> None:
    ours = {row["name"]: row for row in seen["facts"]["interfaces"]}
    theirs = {row["ifname"]: row for row in seen["ip"]}
    assert set(ours) == set(theirs) >= {"lo", "end", "bridged", "bridge0", "vx", "tun"}
    for name, row in theirs.items():
        kind = row.get("linkinfo", {}).get("info_kind", "loopback")
        assert ours[name]["type"] == kind, name
        assert ours[name]["mtu"] == row["mtu"] and ours[name]["master"] == row.get("master")
        assert (ours[name]["state"] == "up") == (
            "UP" in row["flags"] and row["operstate"] != "DOWN"
        ), name
        addresses = {f"{info['local']}/{info['prefixlen']}" for info in row["addr_info"]}
        assert {*ours[name]["ipv4"], *ours[name]["ipv6"]} == addresses, name
    assert seen["facts"]["default_route"]["iface"] == "end"


def test_the_connection_decides_the_interface_and_without_one_none_is_chosen(
    seen: dict[str, dict],
) -> None:
    assert seen["unconnected"]["socket_ifname"] is None
    assert (seen["answer"]["socket_ifname"], seen["answer"]["node_ip"]) == ("end", "10.5.0.2")
    assert (seen["ipv6"]["socket_ifname"], seen["ipv6"]["node_ip"]) == ("end", "fd00:5::2")
    assert seen["ipv6"]["env"]["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_the_head_prints_one_table_of_all_nodes_with_deviations_marked(lab: Lab) -> None:
    lab.run("n02", ["ip", "link", "set", "eth0", "mtu", "1400"])
    try:
        attempt = Attempt(lab, "compared", stub_ray=True)
        attempt.wait_until_it_works()
    finally:
        lab.run("n02", ["ip", "link", "set", "eth0", "mtu", "1500"])
    rows = {
        line.split()[0]: line.split()
        for line in attempt.log("agent-n01.log").splitlines()
        if " eth0 " in line
    }
    for node in ("n01", "n02"):
        assert "NCCL_SOCKET_IFNAME==eth0  # = makes NCCL match" in attempt.log(f"agent-{node}.log")
    # of two nodes that differ, either may be the wrong one: both are marked
    assert rows["n01"][1:5] == ["eth0", lab.ip("n01"), "!1500", "none"]
    assert rows["n02"][1:5] == ["eth0", lab.ip("n02"), "!1400", "none"]
    attempt.end()
