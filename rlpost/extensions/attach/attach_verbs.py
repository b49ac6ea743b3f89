"""``rlpost attach``, ``exec`` and ``tunnel``: run commands on the nodes of a running job.

Input: a run and one of its nodes.
Output: an ``srun --overlap`` step in the run's code; or how to reach Ray's dashboard. Slurm is
queried once, for the nodes; the rest is in the run folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.addresses import host_port, http_url
from common.attempt import CONTAINER_PREFIX, SECRET_FILE
from common.host_lists import expand
from common.run_folder import RunFolder
from rlpost.cli.runs import (
    LOCAL,
    add_run_options,
    current_job,
    find_run,
    last,
    local_is_alive,
    running_job,
)
from rlpost.config.arguments import Parser
from rlpost.config.keys import without_keys
from rlpost.errors import ConfigError
from rlpost.extensions.attach.job_step import Inside, step_argv
from slurm.client import job_info
from slurm.job_id import cluster_of, on_cluster
from slurm.states import JobState
from slurm.variables import login_variables, submission_environment

DASHBOARD_PORT = 8265  # of the tunnel, on the user's machine
_IGNORED_MOUNTS = re.compile(
    rb"^.*pyxis: ignoring --container-mounts when attaching to a running container\n", re.M
)
_DASHBOARD = re.compile(
    r"view the dashboard at [^\n]*\n[^\n]*?(?:http://)?(?P<address>\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\d+)[ \t]*$",
    re.M,
)


def attach_main(arguments: Sequence[str]) -> int:
    """Open a shell on a node of a run; the head by default."""
    made = Parser(prog="rlpost attach", description="A shell on a node of a running run.")
    made.add_argument("node", nargs="?", metavar="NODE", help="host name (default: the head)")
    add_run_options(made, positional=False)
    options = made.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    job_id, nodes = running_nodes(run)
    node = _check_node(options.node, nodes) or head_of(run, nodes)
    inside = _inside(run, job_id)
    return _run(
        step_argv(job_id, ["bash", "-i"], nodes=[node], inside=inside, terminal=True), inside
    )


def exec_main(arguments: Sequence[str]) -> int:
    """Run a command on one node, or on all with the node's number before each output line."""
    parser = Parser(
        prog="rlpost exec",
        usage="rlpost exec [--run RUN] [--node HOST] [--] COMMAND...",
        description="Run a command on every node of a running job, next to its processes.",
    )
    add_run_options(parser, positional=False)
    parser.add_argument("--node", metavar="HOST", help="on this node only, without line prefixes")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError("which command? for instance: rlpost exec nvidia-smi")
    run = find_run(options.run, options.runs_dir)
    job_id, nodes = running_nodes(run)
    node = _check_node(options.node, nodes)
    inside = _inside(run, job_id)
    return _run(step_argv(job_id, command, nodes=[node] if node else nodes, inside=inside), inside)


def tunnel_main(arguments: Sequence[str]) -> int:
    """Print the ssh command that forwards Ray's dashboard, or its address on this machine."""
    parser = Parser(prog="rlpost tunnel", description="How to reach Ray's dashboard.")
    add_run_options(parser)
    parser.add_argument(
        "--login", metavar="HOST", help="login node as seen from your machine (default: this one)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DASHBOARD_PORT,
        help=f"port on your machine (default: {DASHBOARD_PORT})",
    )
    options = parser.parse_args(arguments)
    if not 0 < options.port < 65536:
        raise ConfigError(
            f"--port {options.port}: a port, 1 to 65535; for instance {DASHBOARD_PORT}"
        )
    run = find_run(options.run, options.runs_dir)
    login = options.login or os.uname().nodename
    if is_local(run):
        address, port = dashboard_address(run)
        print(f"on this machine: {http_url(address, port)}")
        print(f"from another: {tunnel_command(login, None, address, port, options.port)}")
    else:
        _, nodes = running_nodes(run)
        print(tunnel_command(login, head_of(run, nodes), *dashboard_address(run), options.port))
    secret = (run.attempts / "latest").resolve() / SECRET_FILE
    print(f"then open http://localhost:{options.port}; it asks for the token in {secret}")
    return 0


def tunnel_command(
    login: str, head: str | None, address: str, port: int, own_port: int = DASHBOARD_PORT
) -> str:
    """Return the ssh command for the user's machine.

    If the dashboard listens on the head's loopback only, ssh jumps through the login node to the
    head; the login node reaches any other address itself. ``head`` is None where the run is on the
    login node.
    """
    forward = f"ssh -N -L {own_port}:{host_port(address, port)}"
    is_on_login = head is None or not address.startswith(("127.", "::1"))
    return f"{forward} {login}" if is_on_login else f"{forward} -J {login} {head}"


def dashboard_address(run: RunFolder) -> tuple[str, int]:
    """Return address and port of Ray's dashboard, as ``ray start`` logged them.

    With ``--ray-dashboard-host 0.0.0.0`` Ray prints the node's own address. Raises ConfigError.
    """
    for log in sorted((run.attempts / "latest").glob("*ray*.log")):
        if match := _DASHBOARD.search(log.read_text(errors="replace")):
            return match["address"].strip("[]"), int(match["port"])
    raise ConfigError(
        f"{run.root.name}: no log reports a running Ray dashboard; submit with --ray-dashboard"
    )


def is_local(run: RunFolder) -> bool:
    """Return whether a run is active on this machine, without Slurm.

    Raises ConfigError when such a run has ended.
    """
    job_id = current_job(run)
    if not job_id.startswith(LOCAL):
        return False
    if not local_is_alive(job_id):
        raise ConfigError(
            f"{run.root.name}: the run on this machine has ended, and so has its dashboard"
        )
    return True


def running_nodes(run: RunFolder) -> tuple[str, tuple[str, ...]]:
    """Return the job of a run, by its own number, and its nodes in Slurm's order.

    Raises ConfigError if it is not running.
    """
    entry = running_job(run, what_for="use rlpost status RUN and rlpost logs RUN on this machine")
    return _own_number(run, entry.job_id), expand(entry.nodelist)


def _own_number(run: RunFolder, job_id: str) -> str:
    """Return the id with which srun and containers know a job: a task of an array has a number."""
    if "_" not in job_id:
        return job_id
    info = job_info(job_id)
    if info.state is JobState.UNKNOWN:
        raise ConfigError(
            f"{run.root.name}: scontrol does not report the number of job {job_id}, a task of an array, "
            "which srun needs; check with scontrol ping that the controller is up"
        )
    return on_cluster(info.job_id, cluster_of(job_id))


def head_of(run: RunFolder, nodes: Sequence[str]) -> str:
    """Return the driver's node: the first of the newest attempt; without one, Slurm's first."""
    used = last(run.ledger.read(), "started").get("nodes") or []
    return used[0] if used and used[0] in nodes else nodes[0]


def _inside(run: RunFolder, job_id: str) -> Inside:
    from rlpost.cli.job import container_of_attempt
    from rlpost.config.load import read_dump

    attempt, prefix = (run.attempts / "latest").resolve(), []
    try:
        cluster = read_dump(run.run_json.read_text())[0].cluster
        container = container_of_attempt(cluster, attempt)
        if container is not None and container.backend == "command":
            prefix = json.loads((attempt / CONTAINER_PREFIX).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run.run_json} or {attempt}: cannot be read, so the run's container is not known: {error}"
        ) from error
    # Ray's commands authenticate with the attempt's secret.
    secret = attempt / SECRET_FILE
    variables = {
        **cluster.environment,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(secret),
    }
    inside = Inside(run.root, home_of(run), environment=tuple(variables.items()))
    if container is None or container.backend == "command":
        return replace(inside, container=container, prefix=tuple(prefix))
    info = job_info(job_id)
    if info.state is JobState.UNKNOWN:
        raise ConfigError(
            f"{run.root.name}: scontrol does not report the restart count of job {job_id}, which is "
            "part of its container's name; check with scontrol ping that the controller is up"
        )
    return replace(inside, container=container, num_restarts=info.num_restarts)


def home_of(run: RunFolder) -> Path:
    """Return the folder of a run's code: the snapshot of ``rlpost submit``, or RLPOST_HOME.

    Raises:
        ConfigError: neither is known to exist.
    """
    if run.code.is_dir():
        return run.code
    recorded = last(run.ledger.read(), "attempt").get("home")
    # A run whose batch host has no Python has no such entry. Its script creates the folder
    # HOME/runs/NAME-JOB.
    for home in filter(None, (recorded, run.root.parent.parent)):
        if (Path(home) / "bootstrap").is_dir():
            return Path(home)
    raise ConfigError(
        f"{run.root}: has no folder code, and {recorded or 'the ledger'} does not lead to the code "
        "of the run; link the RLPOST_HOME of its sbatch as code in the run folder"
    )


def _check_node(node: str | None, nodes: Sequence[str]) -> str | None:
    if node is not None and node not in nodes:
        raise ConfigError(f"{node} is not a node of this run; its nodes are {', '.join(nodes)}")
    return node


def _run(argv: Sequence[str], inside: Inside) -> int:
    home = str(inside.home)
    environ = submission_environment(without_keys(os.environ))
    environ = {**login_variables(), **environ, "RLPOST_HOME": home, "PYTHONPATH": home}
    container = inside.container
    if container is None or container.backend != "pyxis" or "--pty" in argv:
        return subprocess.run(argv, env=environ).returncode
    read_end, write_end = os.pipe()
    copying = threading.Thread(target=_copy_errors, args=(read_end,))
    copying.start()
    try:
        return subprocess.run(argv, env=environ, stderr=write_end).returncode
    finally:
        os.close(write_end)
        copying.join()


def _copy_errors(read_end: int) -> None:
    """Copy srun's standard error without the line that pyxis prints for each node.

    The mounts are given in case pyxis does not find the running container, see ``rlpost.extensions.attach.job_step``.
    """
    with os.fdopen(read_end, "rb", buffering=0) as source:
        # srun writes whole lines; a progress bar without an end of line must not be held back
        while chunk := source.read(1 << 16):
            sys.stderr.buffer.write(_IGNORED_MOUNTS.sub(b"", chunk))
            sys.stderr.buffer.flush()
