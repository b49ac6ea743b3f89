"""Ray on this node: prepare its process under a keeper, start it, monitor its exit.

Input: a ``RayNode``. Output: ``LocalRay`` with the registered nodes (on the head) and a future of
its exit. Invariant: the session folder belongs to this attempt, is accessible to its owner only,
and is removed after Ray in any case.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bootstrap.agent.early_exits import with_likely_cause
from bootstrap.agent.ray_command import RayNode, ray_temp_dir, start_argv
from bootstrap.agent.ray_process import parse_registered
from bootstrap.agent.verdict import describe_exit
from bootstrap.links.awaiting import first_of
from bootstrap.links.monitor import Kept
from bootstrap.links.session_folder import SessionFolder
from common.addresses import host_port
from common.files import tail
from common.port_blocks import busy_ports

logger = logging.getLogger(__name__)

_END_GRACE_S = 10.0
_LAST_WORDS_S = 2.0  # Ray's last output may arrive after its exit is known


class RayError(Exception):
    """Ray cannot start on this node, or ended."""


class LocalRay:
    """A process that has imported Ray and becomes ``ray start --block`` on request."""

    def __init__(self, kept: Kept, session_folder: Path, log: Path, orders: int) -> None:
        self.kept = kept
        # on the head: GPUs of each node in the GCS, by address
        self.registered: dict[str, int] = {}
        self._news = asyncio.Event()
        self._session_folder = session_folder
        self._log = log
        self._orders: int | None = orders
        self._copying: asyncio.Task[None] | None = None

    @classmethod
    async def prepare(
        cls, session: SessionFolder, environ: Mapping[str, str], log: Path
    ) -> LocalRay:
        """Start a process that imports Ray; returns at once.

        Raises:
            RayError: the session folder could not be made.
        """
        if session.problem:
            raise RayError(session.problem)
        output, input_end = os.pipe()
        orders_end, orders = os.pipe()
        argv = [sys.executable, "-u", "-m", "bootstrap.agent.ray_process"]
        try:
            kept = await Kept.start(
                "Ray", argv, environ=environ, stdio=(orders_end, input_end), scratch=session.all
            )
        finally:
            os.close(orders_end)
            os.close(input_end)
        ray = cls(kept, session.path, log, orders)
        ray._copying = asyncio.create_task(ray._copy(output))
        return ray

    def start(self, node: RayNode, environ: Mapping[str, str]) -> None:
        """Start Ray; ``environ`` is added to the environment of the process.

        Raises:
            RayError: a port is in use.
        """
        if taken := busy_ports(node.ports.service_ports):
            raise RayError(
                f"ports {taken} are in use; they belong to this job's block from {node.ports.base} on"
            )
        watch = host_port(node.ip, node.ports.gcs) if node.is_head else None
        order = {"argv": start_argv(node), "environ": dict(environ), "watch": watch}
        assert self._orders is not None, "start may be called once"
        with suppress(BrokenPipeError):  # the process has exited; wait_registered reports that
            os.write(self._orders, json.dumps(order).encode() + b"\n")
        if not node.is_head:
            self.stop_watching()

    async def wait_registered(self, num_gpus_by_ip: Mapping[str, int]) -> None:
        """Wait until all these nodes are registered in the GCS. On the head only.

        ``num_gpus_by_ip``: number of GPUs of each node, by address.

        Raises:
            RayError: Ray exited, or a node has a different number of GPUs.
        """
        while missing := num_gpus_by_ip.keys() - self.registered.keys():
            self._news.clear()
            news = asyncio.create_task(self._news.wait())
            await first_of(news, self.kept.exited)
            news.cancel()
            if self.kept.exited.done():
                raise RayError(
                    f"{await self.last_words()}\nnot registered: {', '.join(sorted(missing))}"
                )
        for ip, num_gpus in num_gpus_by_ip.items():
            if self.registered[ip] != num_gpus:
                raise RayError(
                    f"Ray has {self.registered[ip]} GPUs on {ip}; {num_gpus} are needed there"
                )

    def stop_watching(self) -> None:
        """Close the process's input, which ends its reports about registered nodes."""
        if self._orders is not None:
            os.close(self._orders)
            self._orders = None

    async def last_words(self) -> str:
        """Message about the exit of Ray, with the last lines of its log."""
        if self._copying is not None:
            await asyncio.wait([self._copying], timeout=_LAST_WORDS_S)
        exited = self.kept.exited
        code = describe_exit(exited.result()) if exited.done() else "still running"
        last_lines = await asyncio.to_thread(tail, self._log)  # on the shared file system
        return (
            f"Ray ended by itself ({code}), see {self._log.name}: {with_likely_cause(last_lines)}"
        )

    async def end(self, keep_logs_in: Path | None) -> None:
        """End Ray; copy its logs to ``keep_logs_in`` unless that is None."""
        self.stop_watching()
        await self.kept.end(_END_GRACE_S)
        logs = Path(ray_temp_dir(str(self._session_folder))) / "session_latest" / "logs"
        if keep_logs_in is not None and logs.exists():
            try:
                shutil.copytree(
                    logs, keep_logs_in, dirs_exist_ok=True, ignore_dangling_symlinks=True
                )
            except (OSError, shutil.Error) as error:
                logger.warning("some of Ray's logs could not be kept: %s", error)
        self.kept.release()
        if self._copying is not None:
            self._copying.cancel()

    async def _copy(self, descriptor: int) -> None:
        """Append Ray's output to the log and parse the lines about registered nodes."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        rest = b""
        try:
            while data := await reader.read(65_536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._read_line(line.decode(errors="replace"))
                # A full disk is detected elsewhere (``disks``); a thread, as the folder may stall.
                with suppress(OSError):
                    await asyncio.to_thread(_append, self._log, data)
        finally:
            transport.close()

    def _read_line(self, line: str) -> None:
        if found := parse_registered(line):
            ip, num_gpus = found
            self.registered[ip] = num_gpus
            self._news.set()


def _append(log: Path, data: bytes) -> None:
    with log.open("ab", buffering=0) as file:
        file.write(data)
