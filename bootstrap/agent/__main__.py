"""Entry point of the agent of one node.

    python -u -m bootstrap.agent --attempt-dir DIR --num-gpus N -- DRIVER...

Input: the command line, Slurm's environment, the attempt's folder with its secret. Output: the
verdict in that folder. The verdict is the result: the exit code is 0 if it exists, and 1 only if it
could not be written (or if this node never found the head).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

from bootstrap.agent.head import HeadAgent
from bootstrap.agent.node import NodeAgent
from bootstrap.agent.options import Options, parse_options
from bootstrap.agent.rendezvous import BringupError
from bootstrap.agent.verdict import AttemptVerdict, write_verdict
from bootstrap.links.deadline import JobClock
from bootstrap.links.identity import Facts, FactsError, read_facts
from bootstrap.links.monitor import StopSignals
from bootstrap.network.here import NetworkError
from bootstrap.preflight.probe import raise_limits
from common.attempt import SECRET_FILE, VERDICT_FILE
from common.files import write_first
from common.jit_caches import jit_cache_environment
from common.log_format import configure_logging
from common.modes import become_private
from common.port_blocks import PortError

logger = logging.getLogger(__name__)

# USR2 and TERM announce a preemption or a time limit; INT is Ctrl-C at a local run.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


def read_secret(attempt_dir: Path, facts: Facts) -> bytes:
    """Read the attempt's secret; outside Slurm, create it first.

    Raises:
        FactsError: the batch script has written no secret.
    """
    path = attempt_dir / SECRET_FILE
    if not facts.in_slurm:
        write_first(path, secrets.token_hex(32) + "\n")
    try:
        secret = path.read_text().strip()
    except FileNotFoundError:
        secret = ""
    if len(secret) < 32:
        raise FactsError(
            f"{path} holds no secret of at least 32 characters; the batch script must create it"
        )
    return secret.encode()


async def _run(facts: Facts, options: Options, secret: bytes) -> None:
    clock = JobClock(
        os.environ if facts.in_slurm else {},
        lead_s=options.signal_lead_s,
        attempt_dir=options.attempt_dir if facts.in_slurm else None,
    )
    stop = StopSignals(options.attempt_dir, facts.host, clock, is_head=facts.is_head)
    stop.listen_to(*_STOP_SIGNALS)
    role = HeadAgent if facts.is_head else NodeAgent
    await role(facts, options, secret, stop).run()


def main() -> int:
    """Run the agent; returns its exit code."""
    become_private()
    raise_limits()
    options = parse_options(sys.argv[1:])
    host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    configure_logging(f"agent[{host}]", log_format=options.log_format)
    if (options.attempt_dir / VERDICT_FILE).exists():
        logger.error(
            "%s already has a verdict; use a new --attempt-dir for every start", options.attempt_dir
        )
        return 1
    facts = None
    try:
        options.attempt_dir.mkdir(parents=True, exist_ok=True)
        os.environ.update(jit_cache_environment(os.environ))  # for Ray, its workers and the driver
        facts = read_facts(os.environ, host)
        asyncio.run(_run(facts, options, read_secret(options.attempt_dir, facts)))
    except Exception as error:  # the batch script needs a verdict after any error
        expected = isinstance(error, (FactsError, BringupError, NetworkError, PortError, OSError))
        logger.error("%s", error, exc_info=None if expected else error)
        if facts is not None and not facts.is_head:
            return 1
        try:
            write_verdict(
                options.attempt_dir,
                AttemptVerdict("failed", f"the agent on {host} failed: {error!r}"),
            )
        except OSError:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
