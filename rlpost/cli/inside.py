"""``rlpost attach``, ``exec`` and ``tunnel``: into a run that is under way.

In: a run and a node of it. Out: an ``srun --overlap`` beside what the job runs, started in the run's code; or the ssh
command that brings Ray's dashboard to this machine. One question to Slurm, for the nodes; the rest is in the folder.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Sequence

from rlpost.arguments import Parser
from rlpost.cli.runs import add_run_options, find_run, last, running_job
from rlpost.config.keys import without_keys
from rlpost.errors import ConfigError
from slurm.client import job_info
from slurm.environment import outside_any_job
from slurm.nodelist import expand
from slurm.run_folder import RunFolder
from slurm.states import JobState
from slurm.step import Inside, step_argv

DASHBOARD_PORT = 8265  # where a browser of the person's own machine finds it


def attach_main(arguments: Sequence[str]) -> int:
    """A shell on a node of a run, the head unless named."""
    made = Parser(prog="rlpost attach", description="A shell on a node of a running run.")
    made.add_argument("node", nargs="?", metavar="NODE", help="host name; the head if not given")
    add_run_options(made, positional=False)
    options = made.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    job_id, nodes = running_nodes(run)
    node = _checked(options.node, nodes) or head_of(run, nodes)
    return _run(run, step_argv(job_id, ["bash", "-i"], nodes=[node], inside=_inside(run, job_id), terminal=True))


def exec_main(arguments: Sequence[str]) -> int:
    """A command once on every node of a run, each line with the node's number before it; or on one node."""
    made = Parser(
        prog="rlpost exec",
        usage="rlpost exec [--run RUN] [--node HOST] [--] COMMAND...",
        description="Run a command on every node of a running run, beside what it does.",
    )
    add_run_options(made, positional=False)
    made.add_argument("--node", metavar="HOST", help="only there, and without a number before each line")
    made.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = made.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise ConfigError("which command? for instance: rlpost exec nvidia-smi")
    run = find_run(options.run, options.runs_dir)
    job_id, nodes = running_nodes(run)
    node = _checked(options.node, nodes)
    return _run(run, step_argv(job_id, command, nodes=[node] if node else nodes, inside=_inside(run, job_id)))


def tunnel_main(arguments: Sequence[str]) -> int:
    """Print the ssh command that brings Ray's dashboard from the head through the login node."""
    made = Parser(prog="rlpost tunnel", description="The ssh command for Ray's dashboard.")
    add_run_options(made)
    made.add_argument("--login", metavar="HOST", help="login node as seen from your machine (default: this one)")
    options = made.parse_args(arguments)
    run = find_run(options.run, options.runs_dir)
    _, nodes = running_nodes(run)
    print(tunnel_command(options.login or os.uname().nodename, head_of(run, nodes), dashboard_port(run)))
    secret = (run.attempts / "latest").resolve() / "secret"
    print(f"then open http://localhost:{DASHBOARD_PORT}; it asks for the token in {secret}")
    return 0


def tunnel_command(login: str, head: str, port: int) -> str:
    """The ssh command. The dashboard listens on the head's loopback alone, so ssh goes on from the login node to it."""
    return f"ssh -N -L {DASHBOARD_PORT}:127.0.0.1:{port} -J {login} {head}"


def dashboard_port(run: RunFolder) -> int:
    """Port of Ray's dashboard, as ``ray start`` has printed it into the attempt's logs. Raises ConfigError."""
    for log in sorted((run.attempts / "latest").glob("*ray*.log")):
        match = re.search(r"view the dashboard at [^\n]*\n[^\n]*?127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))
        if match:
            return int(match[1])
    raise ConfigError(f"{run.root.name}: no log says that Ray's dashboard is up; submit with --ray-dashboard")


def running_nodes(run: RunFolder) -> tuple[str, tuple[str, ...]]:
    """The job of a run and its nodes, in Slurm's order. Raises ConfigError when it is not running."""
    entry = running_job(run, what_for="look at it from here")
    return entry.job_id, expand(entry.nodelist)


def head_of(run: RunFolder, nodes: Sequence[str]) -> str:
    """The node of the driver: the first that the newest attempt has used, or before that Slurm's first."""
    used = last(run.ledger.read(), "started").get("nodes") or []
    return used[0] if used and used[0] in nodes else nodes[0]


def _inside(run: RunFolder, job_id: str) -> Inside:
    from rlpost.cli.submit import container_of
    from rlpost.config.load import parse_dump

    try:
        container = container_of(parse_dump(run.run_json.read_text()).cluster)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run.run_json}: cannot be read, so the run's container is not known: {error}") from error
    if container is None:
        return Inside(run.root, run.code)
    info = job_info(job_id)
    if info.state is JobState.UNKNOWN:
        raise ConfigError(
            f"{run.root.name}: scontrol does not say how often job {job_id} was restarted, and its container's name "
            "holds that; does scontrol ping say that the controller is up?"
        )
    return Inside(run.root, run.code, container, info.num_restarts)


def _checked(node: str | None, nodes: Sequence[str]) -> str | None:
    if node is not None and node not in nodes:
        raise ConfigError(f"{node} is no node of this run; it has {', '.join(nodes)}")
    return node


def _run(run: RunFolder, argv: Sequence[str]) -> int:
    environ = {**outside_any_job(without_keys(os.environ)), "RLPOST_HOME": str(run.code), "PYTHONPATH": str(run.code)}
    # Ray's own commands ask for the attempt's secret; this is its place.
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str((run.attempts / "latest").resolve() / "secret")}
    return subprocess.run(argv, env=environ).returncode
