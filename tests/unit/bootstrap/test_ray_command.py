"""Invariant: every value that Ray would otherwise guess is given, and no variable of the launcher
reaches it.
"""

from pathlib import Path

import pytest

from bootstrap.agent.ray_command import (
    RayNode,
    base_environment,
    network_environment,
    ray_environment,
    start_argv,
    temp_dir,
)
from bootstrap.links.identity import Facts
from common.port_blocks import PortBlock

FACTS = Facts("n02", 1, ("n01", "n02"), "4711", 3, in_slurm=True)

SHARED = """
--node-manager-port=20004
--object-manager-port=20005
--runtime-env-agent-port=20006
--dashboard-agent-grpc-port=20007
--dashboard-agent-listen-port=20008
--metrics-export-port=20009
--min-worker-port=20016
--max-worker-port=20599
--temp-dir=/tmp/r4711.3/t
--num-cpus=96
--num-gpus=8
"""
HEAD = (
    """start
--head
--port=20001
--include-dashboard=false
--dashboard-host=127.0.0.1
--dashboard-port=20002
--no-monitor
--node-ip-address=10.77.0.11"""
    + SHARED
    + """--object-store-memory=1000
--include-log-monitor=false --disable-usage-stats --log-style=record --log-color=false --block"""
)
NODE = (
    """start
--address=10.77.0.11:20001
--node-ip-address=10.77.0.12"""
    + SHARED
    + "--include-log-monitor=false --disable-usage-stats --log-style=record --log-color=false --block"
)


def ray_node(ip: str, object_store_memory: int | None) -> RayNode:
    return RayNode(ip, "10.77.0.11", PortBlock(20_000), "/tmp/r4711.3", 96, 8, object_store_memory)


def test_the_command_of_the_head() -> None:
    assert start_argv(ray_node("10.77.0.11", 1000)) == HEAD.split()


def test_the_command_of_another_node_has_no_option_of_the_head() -> None:
    assert start_argv(ray_node("10.77.0.12", None)) == NODE.split()


def test_what_launchers_leave_behind_does_not_reach_ray_or_the_driver() -> None:
    names = "SLURM_NODEID SLURMD_NODENAME SBATCH_X PMI_RANK PMIX_RANK PMI2 OMPI_COMM RANK LOCAL_RANK WORLD_SIZE"
    names += " MASTER_ADDR MASTER_PORT RAY_ADDRESS RAY_AUTH_TOKEN"
    launchers = {name: "x" for name in names.split()}
    kept = {"PATH": "/bin", "MASTER": "mine", "RANKING": "1", "CUDA_VISIBLE_DEVICES": "0"}
    environ = base_environment({**launchers, **kept}, FACTS, Path("/run/secret"))
    assert not launchers.keys() & environ.keys()
    assert kept.items() <= environ.items()
    assert environ["RLPOST_JOB_ID"] == "4711" and environ["RLPOST_RESTART_COUNT"] == "3"


def test_the_secret_is_named_by_its_file_only() -> None:
    environ = base_environment({}, FACTS, Path("/run/secret"))
    assert environ["RAY_AUTH_MODE"] == "token" and environ["RAY_AUTH_TOKEN_PATH"] == "/run/secret"


def test_ray_ends_at_once_when_told_and_uses_the_nodes_interface() -> None:
    environ = ray_environment({"PATH": "/bin"})
    assert environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0" and environ["PATH"] == "/bin"
    on_top = network_environment(environ, ray_node("10.77.0.12", None), "eth0", {})
    assert on_top["NCCL_SOCKET_IFNAME"] == "=eth0" and "PATH" not in on_top
    assert "NCCL_SOCKET_FAMILY" not in on_top


def test_the_gcs_answers_ray_status_itself_unless_the_user_says_otherwise() -> None:
    """tests/contract/test_agent.py runs the command."""
    assert ray_environment({})["RAY_enable_autoscaler_v2"] == "1"
    assert ray_environment({"RAY_enable_autoscaler_v2": "0"})["RAY_enable_autoscaler_v2"] == "0"


def test_nccl_is_told_when_the_nodes_address_is_ipv6() -> None:
    assert (
        network_environment({}, ray_node("fd00::1", None), "eth0", {})["NCCL_SOCKET_FAMILY"]
        == "AF_INET6"
    )


def test_a_folder_too_long_for_a_socket_is_refused() -> None:
    assert temp_dir(FACTS) == "/tmp/r4711.3"
    with pytest.raises(ValueError, match="socket"):
        temp_dir(Facts("n", 0, ("n",), "9" * 60, 0, in_slurm=True))


def test_what_was_detected_of_the_fabric_yields_to_what_the_user_has_set() -> None:
    base = {"NCCL_IB_HCA": "mlx5", "UCX_NET_DEVICES": ""}
    fabric = {"NCCL_IB_HCA": "=a:1", "UCX_NET_DEVICES": "a:1,eth0", "FI_PROVIDER": "efa"}
    environ = network_environment(base, ray_node("10.77.0.12", None), "eth0", fabric)
    assert "NCCL_IB_HCA" not in environ
    assert environ["UCX_NET_DEVICES"] == "a:1,eth0" and environ["FI_PROVIDER"] == "efa"
