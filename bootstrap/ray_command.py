"""How Ray is started on a node: argv and environment, purely.

Comes in: addresses, ports and the inherited environment. Goes out: what to execute. Nothing here runs anything.
Ray is always told its address, all its ports and its folder; every guess it makes by itself (first route, 127.0.1.1
from /etc/hosts, /tmp/ray, ports 6379 and 10001, the machine's CPUs) is wrong somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bootstrap.facts import Facts
from bootstrap.network import socket_environment
from bootstrap.ports import PortBlock, host_port

STARTED_LINE = b"Ray runtime started"  # printed by `ray start --block` once the node's raylet is registered

# sockaddr_un.sun_path holds 107 bytes and Ray appends about 65 ("/session_<date>_<time>_<pid>/sockets/plasma_store").
_MAX_TEMP_DIR_BYTES = 40

# What a launcher leaves in the environment makes programs below Ray believe that they are ranks of it.
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
    has_dashboard: bool = False


def temp_dir(facts: Facts) -> str:
    """Folder of Ray's session, node-local and this attempt's own.

    Raises:
        ValueError: the name is too long for a Unix socket inside it.
    """
    path = f"/tmp/r{facts.job_id}.{facts.restart_count}"
    if len(path.encode()) > _MAX_TEMP_DIR_BYTES:
        raise ValueError(f"{path} has {len(path)} bytes; more than {_MAX_TEMP_DIR_BYTES} do not fit a socket's name")
    return path


def start_argv(python: str, node: RayNode) -> list[str]:
    """The command that runs Ray on a node until it is told to end."""
    is_head = node.ip == node.head_ip
    argv = [python, "-u", "-m", "ray.scripts.scripts", "start"]
    if is_head:
        argv += ["--head", f"--port={node.ports.gcs}"]
        argv += [f"--include-dashboard={str(node.has_dashboard).lower()}"]
        argv += ["--dashboard-host=127.0.0.1", f"--dashboard-port={node.ports.base + 2}"]
        argv += [f"--ray-client-server-port={node.ports.base + 3}"]
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
        f"--temp-dir={node.temp_dir}",
        f"--num-cpus={node.num_cpus}",
        f"--num-gpus={node.num_gpus}",
    ]
    if node.object_store_memory is not None:
        argv += [f"--object-store-memory={node.object_store_memory}"]
    return [*argv, "--disable-usage-stats", "--log-style=record", "--log-color=false", "--block"]


def base_environment(inherited: Mapping[str, str], facts: Facts, secret_file: Path) -> dict[str, str]:
    """Environment of the driver, and the part of Ray's that does not depend on the network.

    Ray's token authentication reads the attempt's secret from its file: it is in no argv and in no variable.
    """
    environ = {key: value for key, value in inherited.items() if not _SCRUBBED.fullmatch(key)}
    environ |= {
        "RLPOST_JOB_ID": facts.job_id,
        "RLPOST_RESTART_COUNT": str(facts.restart_count),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(secret_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if "SLURM_JOB_END_TIME" in inherited:
        environ["RLPOST_JOB_END_TIME"] = inherited["SLURM_JOB_END_TIME"]
    return environ


def ray_environment(
    base: Mapping[str, str], ports: PortBlock, ifname: str, fabric: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of ``ray start``; every Ray worker of the node inherits it.

    ``fabric`` is what was detected of this node beyond the interface; what the user has set outranks it.

    Ray drains for 30 s at TERM and keeps looking for a lost head for 60 s by default. Our agents decide when a node
    ends, so neither wait has anything to wait for.
    """
    return {
        **base,
        **{key: value for key, value in (fabric or {}).items() if not base.get(key)},
        **socket_environment(ifname, base),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "AUTOSCALER_METRIC_PORT": str(ports.base + 10),
        "DASHBOARD_METRIC_PORT": str(ports.base + 11),
    }
