"""Process that becomes ``ray start`` after it has imported Ray and has its command.

    python -u -m bootstrap.agent.ray_process < ORDER

Input: one JSON line on standard input: ``argv`` of Ray's command line, ``environ`` to add,
``watch`` (address of the GCS, on the head). An end of file without a line means that Ray is not
needed. Output: that of ``ray start`` and, on the head, one line for each registered node until the
input is closed.

Why not ``ray start`` itself: its imports take longer than the rendezvous, and it reports that it is
up only after polling the GCS for its node, once a second. The other nodes may start as soon as the
head's raylet is registered (Ray retries after 2 s if they are too early), so the registration must
be detected at once. This is the only module of ``bootstrap`` that imports Ray; no agent imports it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Modules of other Ray commands, whose imports (FastAPI and more) take longer than Ray's, and grpc,
# which the Ray client server needs; no option disables that server. Ray skips modules that cannot
# be imported, and None in sys.modules makes an import fail.
_UNUSED = ("ray.serve.scripts", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli", "grpc")
_POLL_S = 0.05
# With spare nodes the registration is watched to the end of the run, in case one joins.
_QUIET_AFTER_S, _QUIET_POLL_S = 60.0, 0.5
_RPC_TIMEOUT_S = 5.0
RAYLET_WAIT_S = 240.0  # the deadline of the bring-up ends an attempt earlier if it is shorter
AGENT_PORT_NAME = "dashboard_agent_listen_port"  # DASHBOARD_AGENT_LISTEN_PORT_NAME of ray._raylet
_ALIVE = 0  # GcsNodeInfo.GcsNodeState
_REGISTERED = "registered node "


def registered_line(ip: str, num_gpus: int) -> str:
    """Line about a node; it begins with a line break because Ray also prints."""
    return f"\n{_REGISTERED}{ip} {num_gpus}\n"


def parse_registered(line: str) -> tuple[str, int] | None:
    """Address and number of GPUs of a watcher's line; None for other lines."""
    if not line.startswith(_REGISTERED):
        return None
    ip, num_gpus = line.removeprefix(_REGISTERED).split()
    return ip, int(num_gpus)


def import_ray() -> Any:
    """Import Ray's command line with only the modules that ``ray start`` needs."""
    for name in _UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]
    from ray.scripts import scripts

    return scripts


def wait_longer_for_raylet(services: Any, limit_s: float = RAYLET_WAIT_S) -> None:
    """Let Ray wait ``limit_s`` for its raylet to register, and no longer than the raylet lives.

    Ray's Node gives up after 30 s, a constant, which a busy machine exceeds. It asks through
    ``services.get_node`` and takes a RuntimeError for "not yet"; here that call waits.
    """
    get_node = services.get_node
    until = time.monotonic() + limit_s

    def get_when_registered(*args: object) -> object:
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if time.monotonic() > until or not _has_raylet():
                    raise
            time.sleep(_POLL_S)

    services.get_node = get_when_registered


def write_agent_port(services: Any, persist_port: Callable[..., None], *, is_served: bool) -> None:
    """Let a raylet find the HTTP port of its dashboard agent at its start.

    The raylet waits 15 s, a constant, for the file in which the agent states the port, and ends
    without it (ray-project/ray#65983); on a busy machine the agent's imports alone take longer. All
    ports are chosen here, so the file is written first, by Ray's own function. ``is_served``:
    whether the agent will serve HTTP; if not, it states -1, too.
    """
    start_raylet = services.start_raylet
    parameters = inspect.signature(start_raylet)

    def start(*args: object, **options: object) -> object:
        named = parameters.bind(*args, **options).arguments
        port = named["dashboard_agent_listen_port"] if is_served else -1
        persist_port(named["session_dir"], named["node_id"], AGENT_PORT_NAME, port)
        return start_raylet(*args, **options)

    services.start_raylet = start


def _has_raylet() -> bool:
    """Whether a child process of this one is a raylet that runs."""
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:  # a kernel without this list: Ray's own limit holds
        return False
    return any(_is_raylet(child) for child in children)


def _is_raylet(pid: str) -> bool:
    try:
        name, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rsplit(") ", 1)
    except (OSError, ValueError):  # it ended after it was listed
        return False
    return name == "raylet" and not state.startswith("Z")


def check_dashboard() -> None:
    """Import what Ray's dashboard needs, which Ray then finds; grpc is there for that alone.

    Raises ImportError with the missing package.
    """
    blocked = sys.modules.pop("grpc", None)
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    finally:
        sys.modules["grpc"] = blocked  # type: ignore[assignment]


def _watch(gcs_address: str, until: int) -> None:
    """Print each node once it is registered in the GCS, until the agent closes ``until``."""
    from ray._raylet import GcsClient
    from ray.exceptions import RpcError

    host, _, port = gcs_address.rpartition(":")
    while not _accepts(host.strip("[]"), int(port)):  # a client created too early waits for seconds
        if _is_closed(until):
            return
    client = GcsClient(address=gcs_address)
    printed: set[str] = set()
    newest_at = time.monotonic()
    while not _is_closed(until, _pause_s(time.monotonic() - newest_at)):
        try:
            nodes = client.get_all_node_info(timeout=_RPC_TIMEOUT_S, state_filter=_ALIVE).values()
        except RpcError:
            continue  # ``ray start`` reports a dead GCS
        for node in nodes:
            if node.node_manager_address not in printed:
                printed.add(node.node_manager_address)
                newest_at = time.monotonic()
                num_gpus = int(node.resources_total.get("GPU", 0))
                os.write(1, registered_line(node.node_manager_address, num_gpus).encode())


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_RPC_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _pause_s(quiet_s: float) -> float:
    """Polling interval when no node has registered for ``quiet_s`` seconds."""
    return _POLL_S if quiet_s < _QUIET_AFTER_S else _QUIET_POLL_S


def _is_closed(descriptor: int, pause_s: float = _POLL_S) -> bool:
    """Whether the other end is closed, after at most ``pause_s`` seconds."""
    return bool(wait([descriptor], pause_s))


def _allow_for_a_busy_machine(*, has_dashboard: bool) -> None:
    from ray import _raylet
    from ray._private import services

    wait_longer_for_raylet(services)
    if hasattr(_raylet, "persist_port"):  # earlier versions of Ray have no such file
        write_agent_port(services, _raylet.persist_port, is_served=has_dashboard)


def main() -> int:
    """Entry point of the process."""
    scripts = import_ray()
    orders = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # Ray's child processes must not read the orders
    os.close(nothing)
    with open(orders, "rb", buffering=0, closefd=False) as stream:
        line = stream.readline()
    if not line:
        return 0
    order = json.loads(line)
    os.environ.update(order["environ"])
    if order["watch"]:
        threading.Thread(target=_watch, args=(order["watch"], orders), daemon=True).start()
    has_dashboard = "--include-dashboard=true" in order["argv"]
    if has_dashboard:
        try:
            check_dashboard()
        except ImportError as error:
            print(f"--ray-dashboard: {error}; pip install 'ray[default]' in {sys.executable}")
            return 1
    _allow_for_a_busy_machine(has_dashboard=has_dashboard)
    sys.argv = ["ray", *order["argv"]]
    scripts.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
