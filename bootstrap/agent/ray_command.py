"""Command line and environment to start Ray on a node. Pure.

Input: addresses, ports and the inherited environment. Output: argv and environment. Address, all
ports and folder are always explicit, because each of Ray's defaults (first route, 127.0.1.1 from
/etc/hosts, /tmp/ray, ports 6379 and 10001, the machine's CPUs) is wrong on some cluster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bootstrap.links.identity import Facts
from bootstrap.network.here import socket_environment
from common.addresses import host_port
from common.attempt import SECRET_VARIABLE
from common.port_blocks import PortBlock

# sockaddr_un.sun_path holds 107 bytes and Ray appends about 65
# ("/session_<date>_<time>_<pid>/sockets/plasma_store").
_MAX_TEMP_DIR_BYTES = 40
# Ray makes its temp dir accessible to all users (mode 0777), so it is placed in a private folder.
_RAY_TEMP_DIR = "t"

# Variables of a launcher, which would make programs below Ray act as ranks of that launcher.
_SCRUBBED = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|PMI|PMIX|OMPI|PRTE)_.*|PMI[0-9]?|(LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|RAY_ADDRESS|RAY_AUTH_TOKEN"
)


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of the Ray cluster; ``head_ip`` equals ``ip`` on the head."""

    ip: str
    head_ip: str
    ports: PortBlock
    temp_dir: str
    num_cpus: int
    num_gpus: int
    object_store_memory: int | None = None
    dashboard_host: str | None = None
    """Address of Ray's dashboard on the head; None without one."""

    @property
    def is_head(self) -> bool:
        return self.ip == self.head_ip


def temp_dir(facts: Facts) -> str:
    """Node-local folder of this attempt for Ray's session; Ray's temp dir is its ``ray_temp_dir``.

    Raises:
        ValueError: the path is too long for a Unix socket inside it.
    """
    path = f"/tmp/r{facts.job_id}.{facts.restart_count}"
    if len(ray_temp_dir(path).encode()) > _MAX_TEMP_DIR_BYTES:
        raise ValueError(
            f"{path} has {len(path)} bytes; more than {_MAX_TEMP_DIR_BYTES} do not fit a socket's name"
        )
    return path


def ray_temp_dir(folder: str) -> str:
    """Ray's temp dir in the attempt's folder."""
    return f"{folder}/{_RAY_TEMP_DIR}"


def start_argv(node: RayNode) -> list[str]:
    """Arguments of Ray's command line to run Ray on a node in the foreground.

    The autoscaler's monitor and the log monitor, which sends the workers' output to the driver, are
    disabled. Both are unused, and each is a process that imports Ray while the raylet starts.
    """
    argv = ["start"]
    if node.is_head:
        argv += ["--head", f"--port={node.ports.gcs}"]
        has_dashboard = node.dashboard_host is not None
        argv += [f"--include-dashboard={str(has_dashboard).lower()}"]
        argv += [
            f"--dashboard-host={node.dashboard_host or '127.0.0.1'}",
            f"--dashboard-port={node.ports.base + 2}",
        ]
        argv += ["--no-monitor"]
    else:
        argv += [f"--address={host_port(node.head_ip, node.ports.gcs)}"]
    argv += [
        f"--node-ip-address={node.ip}",
        f"--node-manager-port={node.ports.base + 4}",
        f"--object-manager-port={node.ports.base + 5}",
        f"--runtime-env-agent-port={node.ports.base + 6}",
        f"--dashboard-agent-grpc-port={node.ports.base + 7}",
        f"--dashboard-agent-listen-port={node.ports.base + 8}",
        f"--metrics-export-port={node.ports.base + 9}",
        f"--min-worker-port={node.ports.worker_ports.start}",
        f"--max-worker-port={node.ports.worker_ports.stop - 1}",
        f"--temp-dir={ray_temp_dir(node.temp_dir)}",
        f"--num-cpus={node.num_cpus}",
        f"--num-gpus={node.num_gpus}",
    ]
    if node.object_store_memory is not None:
        argv += [f"--object-store-memory={node.object_store_memory}"]
    argv += ["--include-log-monitor=false", "--disable-usage-stats"]
    return [*argv, "--log-style=record", "--log-color=false", "--block"]


def base_environment(
    inherited: Mapping[str, str], facts: Facts, secret_file: Path
) -> dict[str, str]:
    """Environment of the driver, and the part of Ray's that does not depend on the network.

    Ray's token authentication reads the attempt's secret from its file, so the secret appears in no
    command line and no variable.
    """
    environ = {key: value for key, value in inherited.items() if not _SCRUBBED.fullmatch(key)}
    return environ | {
        "RLPOST_JOB_ID": facts.job_id,
        "RLPOST_RESTART_COUNT": str(facts.restart_count),
        "RAY_AUTH_MODE": "token",
        SECRET_VARIABLE: str(secret_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def ray_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Environment of ``ray start``, which every Ray worker of the node inherits.

    By default Ray drains for 30 s at TERM and reconnects to a lost head for 60 s. The agents decide
    when a node ends, so both timeouts are shortened. Ray's metrics are off: their port would answer
    without the token, on all interfaces.

    Ray's workers, thus trainer ranks and engines, have niceness 15 by default. Graders and the driver
    have 0, and would take the cores of a busy node from them.

    ``ray status`` prints what the autoscaler's monitor last wrote, and no monitor runs
    (``start_argv``). With autoscaler v2 enabled it queries the GCS, which has nodes and resources.
    """
    return {
        "RAY_enable_autoscaler_v2": "1",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",
        **base,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    }


def network_environment(
    base: Mapping[str, str], node: RayNode, ifname: str, fabric: Mapping[str, str]
) -> dict[str, str]:
    """Variables that depend on the node's address, which belongs to the interface ``ifname``.

    ``fabric``: variables detected for this node's RDMA ports; the user's variables in ``base`` take
    precedence.
    """
    return {
        **{key: value for key, value in fabric.items() if not base.get(key)},
        **socket_environment(ifname, base, node.ip),
        "AUTOSCALER_METRIC_PORT": str(node.ports.base + 10),
        "DASHBOARD_METRIC_PORT": str(node.ports.base + 11),
    }
