"""Agents and real Ray on two machines whose only IPv4 address is 127.0.0.1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from common.cluster import Cluster
from tests.cluster.attempts import BRINGUP_S, DRIVER
from tests.cluster.jobs import until
from tests.cluster.lab import REPOSITORY, Lab

ADDRESSES = {"n01": "fd00:77::11", "n02": "fd00:77::12"}


def leave_only_ipv6(lab: Lab, node: str) -> None:
    """Remove the IPv4 addresses of a node; all host names resolve to IPv6 addresses from then on."""
    for ifname in ("eth0", "docker0", "ib0"):
        lab.run(node, ["ip", "-4", "addr", "flush", "dev", ifname])
    lab.run(node, ["ip", "-6", "addr", "add", f"{ADDRESSES[node]}/64", "dev", "eth0", "nodad"])
    lab.run(node, ["mount", "--bind", str(lab.shared / "hosts"), "/etc/hosts"])


def start_agent(lab: Lab, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start an agent as srun would; Slurm's daemons cannot reach the nodes any more."""
    node = lab.nodes[rank]
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NODEID": str(rank), "SLURM_STEP_NODELIST": "n[01-02]"}
    command = [
        sys.executable,
        "-u",
        "-m",
        "bootstrap.agent",
        f"--attempt-dir={folder}",
        "--num-gpus=1",
    ]
    command += [
        "--object-store-memory=100000000",
        "--loss-grace-s=1",
        "--",
        sys.executable,
        f"{folder}/driver.py",
    ]
    environ = {**slurm, "SLURMD_NODENAME": node, "PYTHONPATH": str(REPOSITORY)}
    with (folder / f"agent-{node}.log").open("wb") as log:
        return lab.popen(node, command, env=environ, stdout=log, stderr=log)


def test_ray_works_on_nodes_that_have_only_ipv6_addresses(lab: Lab) -> None:
    folder = lab.shared / "ipv6"
    folder.mkdir()
    (folder / "secret").write_text("5" * 64)
    (folder / "driver.py").write_text(DRIVER)
    names = [f"{ip} {node}" for node, ip in ADDRESSES.items()]
    (lab.shared / "hosts").write_text(
        "\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""])
    )
    for node in ADDRESSES:
        leave_only_ipv6(lab, node)
    agents = [start_agent(lab, rank, folder) for rank in range(2)]
    ready, over = folder / "cluster", folder / "verdict"
    until(lambda: ready.exists() or over.exists(), lab, "a driver that works", deadline_s=BRINGUP_S)
    assert ready.exists(), json.loads((folder / "verdict.json").read_text())["cause"]
    cluster = Cluster.from_json(ready.read_text())
    assert cluster.ray_address.startswith("[fd00:77::11]:")
    assert {node.host: node.ip for node in cluster.nodes} == ADDRESSES
    (folder / "STOP").write_text('{"reason": "enough"}')
    assert [agent.wait(BRINGUP_S) for agent in agents] == [0, 0]
    for node, ip in ADDRESSES.items():
        assert f"after STOP {node} {ip} eth0" in (folder / "driver.log").read_text()
