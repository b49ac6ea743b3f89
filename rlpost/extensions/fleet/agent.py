"""The agent of one fleet engine, started by the engine's job (``rlpost.engines.engine_job``).

Input: the run folder, the engine's name, the file that announces the end of the job. Output: a
server that is paused until the driver admits it, and the engine's record, renewed every BEAT_S; an
exit code for the batch script (``slurm/batch/engine.py``).

    preflight -> wait for a lease -> start the server, paused -> renew the record until asked to leave

The driver sends weights and requests; the agent never resumes its server. Decisions are in
``agent_rules``. Reads of the shared file system run in the same thread: when it hangs, the record
is not renewed, and the driver treats the engine as lost.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from common.addresses import ANYWHERE, local_address
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from common.files import is_there
from common.fleet_name import GROUP, POLICY
from common.jit_caches import jit_cache_environment
from common.log_format import configure_logging
from common.port_blocks import PortError, busy_ports, claim_block, ephemeral_floor
from common.run_folder import RunFolder
from common.stop_file import parse_stop
from rlpost.config.engine_args import engine_args, engine_variables
from rlpost.config.engine_groups import group_config
from rlpost.config.keys import without_keys
from rlpost.config.load import parse_dump
from rlpost.config.tree import Config
from rlpost.durable.daemon_threads import start_in_daemon
from rlpost.engines.engine import Engine
from rlpost.engines.engine_client import EngineClient
from rlpost.errors import RlpostError, RolloutError
from rlpost.extensions.fleet.agent_rules import (
    AgentObservations,
    AgentRules,
    EngineVerdict,
    Patience,
    ServerState,
    end_of_run,
)
from rlpost.extensions.fleet.fleet_folder import FleetError, FleetFolder, settings_digest
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Lease

logger = logging.getLogger(__name__)

POLL_S, BEAT_S = 0.5, 2.0
LEDGER_S = 30.0  # between reads of the ledger while there is no driver
CONTROL_S = 10.0  # timeout of one control request to the agent's server
START_S = 3600.0  # a large model loads slowly; the engine serves nothing before that
NOT_ADMITTED = "not-admitted"
"""Weight version of a new server; not an integer, so that an answer that carries it is an error."""
PATIENCE = Patience()
PREFLIGHT = "bootstrap.doctor.node"


@dataclass(frozen=True, slots=True)
class EngineJobOptions:
    """Arguments of the agent."""

    run_folder: Path
    engine: str
    stop_file: Path
    num_gpus: int
    group: str = POLICY


class StopNotice:
    """Why the job ends soon: TERM to this process, or the file of the batch script."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signal = ""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, self._note)

    def read(self) -> tuple[str, float | None]:
        """Return the reason, empty without one, and the seconds left if they are known."""
        if is_there(self._path):
            try:
                message = parse_stop(self._path.read_text(errors="replace"))
            except OSError:
                return self._signal, None
            # Batch script and agent run on the same node, so their clocks agree.
            left = None if message.deadline is None else message.deadline - time.time()
            return message.reason, left
        return self._signal, None

    def _note(self, number: int, _frame: object) -> None:
        self._signal = f"signal {signal.Signals(number).name}: preemption, or the job was cancelled"


class Agent:
    """Runs one server after another, until the engine has to leave."""

    def __init__(
        self,
        options: EngineJobOptions,
        folder: FleetFolder,
        notice: StopNotice,
        *,
        make_engine: Callable[..., Engine] = Engine,
        patience: Patience = PATIENCE,
        poll_s: float = POLL_S,
    ) -> None:
        self._options, self._folder, self._notice = options, folder, notice
        self._make_engine, self._patience, self._poll_s = make_engine, patience, poll_s
        old_record = folder.engine(options.engine)
        self._record = EngineRecord(
            engine=options.engine,
            incarnation="",
            state=EngineState.STARTING,
            beat=0 if old_record is None else old_record.beat,  # grows over all starts of the job
            num_gpus=options.num_gpus,
            host=socket.gethostname(),
            alive_s=0.0 if old_record is None else old_record.alive_s,
        )
        self._alive_before_s, self._began = self._record.alive_s, time.monotonic()
        self._written_at = self._ledger_at = -1e9
        self._waits, self._run_end = False, ""
        self._ports: Ports | None = None

    def run(self) -> int:
        """Serve until the rules say to leave; return the exit code."""
        while True:
            verdict = self._serve()
            if verdict.exit_code is not None:
                self._report(EngineState.GONE, verdict.reason, now=True)
                logger.info("leaving with %d: %s", verdict.exit_code, verdict.reason)
                return verdict.exit_code
            logger.info("starting the server again: %s", verdict.reason)

    def refuse(self, reason: str) -> None:
        """Report that this node cannot have an engine."""
        self._report(EngineState.GONE, reason, now=True)

    def _serve(self) -> EngineVerdict:
        """Run one server; return why it was stopped."""
        run_json = (self._options.run_folder / "run.json").read_text()
        config = group_config(parse_dump(run_json), self._options.group)
        incarnation = secrets.token_hex(8)
        digest = settings_digest(config.model_dump(mode="json"))
        self._record = self._record.next(incarnation=incarnation, url="", settings=digest)
        rules = AgentRules(
            self._options.engine, incarnation, digest, self._patience, time.monotonic()
        )
        engine: Engine | None = None
        starting: Future[str] | None = None
        try:
            while True:
                lease = self._folder.lease()
                if starting is None and lease is not None and lease.address:
                    engine = self._engine(config)
                    starting = self._start(engine, lease)
                seen = self._seen(lease, engine, starting)
                verdict = rules.step(seen, time.monotonic())
                self._waits = verdict.waits
                if verdict.exit_code is not None or verdict.restart:
                    return verdict
                # Read again: a driver that has just started may have admitted this engine.
                if verdict.pause and engine is not None and self._folder.lease() == lease:
                    self._pause(engine.url)
                self._report(verdict.state, verdict.reason, url=_url(starting))
                time.sleep(self._poll_s)
        finally:
            if engine is not None:
                engine.stop()

    def _engine(self, config: Config) -> Engine:
        os.environ.update(engine_variables(config))  # the server inherits them
        if self._ports is None:
            self._ports = Ports(self._options.engine)
        return self._make_engine(
            model_path=config.checkpoint.hf_checkpoint,
            api_key=self._folder.secret(),
            server_args=server_args(config, self._ports.draw()),
            log_path=self._folder.logs / f"{self._options.engine}-server.log",
            num_gpus=self._options.num_gpus,
            ignores_term=True,
        )

    def _start(self, engine: Engine, lease: Lease) -> Future[str]:
        """Start the server in a thread, paused; the future is its URL."""
        assert self._ports is not None
        port = self._ports.draw()

        def start() -> str:
            host = local_address(driver_address(lease))
            url = engine.start(host, port, deadline_s=START_S).url
            self._pause(url)
            return url

        return start_in_daemon(start)

    def _pause(self, url: str) -> None:
        """Abort the requests of the server and pause it. Raises RolloutError."""
        client = EngineClient(url, self._folder.secret(), timeout_s=CONTROL_S)
        asyncio.run(client.pause("abort"))

    def _seen(
        self, lease: Lease | None, engine: Engine | None, starting: Future[str] | None
    ) -> AgentObservations:
        stop, left_s = self._notice.read()
        server, end = ServerState.STARTING, ""
        if engine is not None and starting is not None and starting.done():
            error = starting.exception()
            if error is not None:
                server, end = ServerState.ENDED, str(error)
            elif engine.alive():
                server = ServerState.READY
            else:
                server, end = ServerState.ENDED, _end_of(engine)
        return AgentObservations(
            lease, self._folder.orders(), stop, left_s, server, end, self._end_of_run()
        )

    def _end_of_run(self) -> str:
        """Return why no further attempt will start; empty if one may, or if there is a driver."""
        if not self._waits:
            return ""
        if time.monotonic() - self._ledger_at >= LEDGER_S:
            self._ledger_at = time.monotonic()
            self._run_end = end_of_run(RunFolder(self._options.run_folder).ledger.read())
        return self._run_end

    def _report(
        self, state: EngineState, reason: str, *, url: str | None = None, now: bool = False
    ) -> None:
        """Write the record if it changed, or if the last write is BEAT_S ago."""
        shown = reason.splitlines()[0] if reason else ""
        alive_s = self._alive_before_s + time.monotonic() - self._began
        changed = self._record.next(
            state=state,
            reason=_printable(shown),
            url=self._record.url if url is None else url,
            alive_s=round(alive_s, 1),
        )
        is_news = (changed.state, changed.url) != (self._record.state, self._record.url)
        if not (is_news or now) and time.monotonic() - self._written_at < BEAT_S:
            return
        try:
            self._folder.write_engine(changed)
        except OSError as error:  # the driver notices that the beat does not grow
            logger.warning("the record could not be written: %s", error)
            return
        self._record, self._written_at = changed, time.monotonic()


def server_args(config: Config, nccl_port: int) -> dict[str, object]:
    """Return the arguments of a fleet engine's server, apart from model, address and key.

    Engines beside --colocate share their GPUs with the trainer, and their fraction of the memory
    leaves room for it. A fleet engine has its GPUs alone, and SGLang chooses.
    """
    own = {"nccl_port": nccl_port, "weight_version": NOT_ADMITTED}
    given = dict(config.sglang.server_args)
    if config.cluster.colocate:
        given.pop("mem_fraction_static", None)
    return {**own, **engine_args(config), **given}


def driver_address(lease: Lease) -> str:
    """Return an address whose route selects the interface that the run's drivers can reach.

    A run on one node has a loopback address, which is a different host here; even on the same node
    the next attempt may start elsewhere. Raises FleetError.
    """
    if not ipaddress.ip_address(lease.address).is_loopback:
        return lease.address
    if "SLURMD_NODENAME" not in os.environ and lease.host in ("", socket.gethostname()):
        return lease.address  # both were started manually on this machine
    try:
        address = str(socket.getaddrinfo(lease.host, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise FleetError(
            f"the driver's host {lease.host} has no address here: {error}; with --socket-ifname the "
            "run uses an interface that other nodes reach"
        ) from error
    # Some hosts have a loopback address for their own name.
    return ANYWHERE if ipaddress.ip_address(address).is_loopback else address


class Ports:
    """The ports of an agent's servers: a block as that of a run, which no other job of the node has."""

    def __init__(self, engine: str) -> None:
        """Claim a block for as long as this object lives. Raises RlpostError."""
        try:
            block, self._claim = claim_block(engine, ephemeral_floor(), "")
        except PortError as error:
            raise RlpostError(str(error)) from error
        self._ports = deque(block.job_ports)
        random.SystemRandom().shuffle(self._ports)

    def draw(self) -> int:
        """Return a port on which nothing listens, again only after all others. Raises RlpostError.

        In random order, so that an earlier server's address is not used again soon.
        """
        for _ in range(len(self._ports)):
            self._ports.rotate()
            port = self._ports[0]
            if not busy_ports(range(port, port + 1)):
                return port
        raise RlpostError(
            f"all ports from {min(self._ports)} to {max(self._ports)} are in use; start another engine job"
        )


def preflight(options: EngineJobOptions) -> str | None:
    """Check this node as a run's agents do; return the problems, None if it is fit."""
    words = ["--num-gpus", str(options.num_gpus), "--folder", str(options.run_folder)]
    command = [sys.executable, "-m", PREFLIGHT, *words]
    environ = _alone(without_keys(os.environ))
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    print(done.stdout, done.stderr, sep="", flush=True)
    return None if done.returncode == 0 else "preflight: this node is not fit; see the engine's log"


def main(argv: Sequence[str]) -> int:
    """Run the agent; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.engines.engine_job")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument(GROUP, default=POLICY)
    options = EngineJobOptions(**vars(parser.parse_args(argv)))
    configure_logging()
    os.environ.update(jit_cache_environment(os.environ))
    folder = FleetFolder(options.run_folder, options.group)
    notice = StopNotice(options.stop_file)
    if folder.orders().says_leave(options.engine):
        logger.info("ordered to leave")
        return EXIT_DONE
    try:
        folder.secret()
        agent = Agent(options, folder, notice)
        if (problem := preflight(options)) is not None:
            agent.refuse(problem)
            return EXIT_FAILED
        return agent.run()
    except RolloutError as error:
        logger.error("%s", error)
        return EXIT_PREEMPTED if notice.read()[0] else EXIT_FAILED
    except RlpostError as error:
        logger.error("%s", error)
        return EXIT_CONFIG


def _url(starting: Future[str] | None) -> str:
    if starting is None or not starting.done() or starting.exception() is not None:
        return ""
    return starting.result()


def _end_of(engine: Engine) -> str:
    try:
        engine.check_alive()
    except RolloutError as error:
        return str(error)
    return "its server ended"


def _printable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable())[:300]


def _alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Slurm's variables, so that only this node is checked."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
