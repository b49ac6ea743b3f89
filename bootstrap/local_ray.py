"""Ray on this node: started under a keeper, its output kept in the attempt's folder, its end noticed.

Comes in: a ``RayNode``. Goes out: ``LocalRay`` with two futures, ``started`` and ``exited``. Invariant: the session
folder is this attempt's own, for the owner alone, and is removed after Ray whatever ends first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from bootstrap.causes import with_likely_cause
from bootstrap.files import tail
from bootstrap.ports import busy_ports
from bootstrap.ray_command import STARTED_LINE, RayNode, start_argv
from bootstrap.supervise import Kept
from bootstrap.verdict import describe_exit

logger = logging.getLogger(__name__)

_END_GRACE_S = 10.0


class RayError(Exception):
    """Ray cannot start on this node, or ended."""


class LocalRay:
    """A running ``ray start --block``."""

    def __init__(self, kept: Kept, node: RayNode, log: Path) -> None:
        self.kept = kept
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._node = node
        self._log = log
        self._copying: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, node: RayNode, environ: Mapping[str, str], log: Path) -> LocalRay:
        """Start Ray and return at once; ``started`` resolves when its raylet is registered.

        Raises:
            RayError: a port is taken or the session folder belongs to somebody else.
        """
        if taken := busy_ports(node.ports.service_ports):
            raise RayError(f"ports {taken} are in use; they belong to this job's block from {node.ports.base} on")
        _make_own_folder(Path(node.temp_dir))
        output, input_end = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            kept = await Kept.start(
                "Ray",
                start_argv(sys.executable, node),
                environ=environ,
                stdio=(nothing, input_end),
                scratch=node.temp_dir,
            )
        finally:
            os.close(nothing)
            os.close(input_end)
        ray = cls(kept, node, log)
        ray._copying = asyncio.create_task(ray._copy(output))
        return ray

    async def wait_started(self) -> None:
        """Raises RayError with the last lines of its log when Ray ends instead."""
        await asyncio.wait([self.started, self.kept.exited], return_when=asyncio.FIRST_COMPLETED)
        if not self.started.done():
            raise RayError(self.describe_end())

    def describe_end(self) -> str:
        """Why there is no Ray any more, for people."""
        code = describe_exit(self.kept.exited.result()) if self.kept.exited.done() else "still running"
        return f"Ray ended by itself ({code}); last lines of {self._log.name}: {with_likely_cause(tail(self._log))}"

    async def end(self, keep_logs_in: Path | None) -> None:
        """End Ray; copy its own logs first when somebody will want to read them."""
        await self.kept.end(_END_GRACE_S)
        logs = Path(self._node.temp_dir) / "session_latest" / "logs"
        if keep_logs_in is not None and logs.exists():
            try:
                shutil.copytree(logs, keep_logs_in, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except (OSError, shutil.Error) as error:
                logger.warning("some of Ray's logs could not be kept: %s", error)
        self.kept.release()
        if self._copying is not None:
            self._copying.cancel()

    async def _copy(self, descriptor: int) -> None:
        """Append Ray's output to the log and look for the line that says it is up."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        last = b""
        try:
            with self._log.open("ab", buffering=0) as file:
                while data := await reader.read(65_536):
                    await asyncio.to_thread(file.write, data)  # the folder is shared and may stall
                    last = last[-len(STARTED_LINE) :] + data
                    if STARTED_LINE in last and not self.started.done():
                        self.started.set_result(None)
        finally:
            transport.close()


def _make_own_folder(path: Path) -> None:
    """Make ``path`` afresh with mode 0700; one that we left behind ourselves is removed first."""
    try:
        if path.lstat().st_uid != os.getuid() or path.is_symlink():
            raise RayError(f"{path} belongs to somebody else and is the name this job needs; remove it")
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    path.mkdir(mode=0o700)
