"""A server in a separate process: start it, wait until it is ready or dead, stop it.

Input: the server, its arguments, the path of its log. Output: a process in its own process group. This process holds
the other end of its standard input, so the server ends whenever this process does (see ``server.end_with_parent``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost.config.keys import without_keys
from rlpost.errors import EngineDied, RolloutError

logger = logging.getLogger(__name__)

EXIT_WAIT_S, KILL_WAIT_S = 10.0, 60.0
LOG_LINES = 30
# A server makes process groups of its own; these would tell it that it is a rank of somebody else's.
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")  # none knows our nodes
NOT_INHERITED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *PROXIES}
ENVIRONMENT = {
    # The router keeps connections to engines open between generations; after SGLang's default of 5 s without a request
    # the engine would close them, and the first requests of the next step would fail on all of them at once.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # otherwise /health generates, and fails while paused
}


class ServerProcess:
    """``python -m rlpost.rollout.server KIND`` under a name that errors and logs use."""

    def __init__(self, kind: str, name: str, log_path: str | Path) -> None:
        self.kind = kind
        self.name = name
        self.log_path = Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        self._scratch = ""

    def spawn(self, arguments: Mapping[str, Any], *, gpus_per_node: int | None = None) -> None:
        """Start the process. Its arguments travel over standard input, for a key is among them.

        ``gpus_per_node``: as of ``Engine.start``.
        """
        assert self._process is None, f"{self.name} was started before"
        environment = {key: value for key, value in without_keys(os.environ).items() if key not in NOT_INHERITED}
        environment |= {key: value for key, value in ENVIRONMENT.items() if key not in environment}
        self._scratch = tempfile.mkdtemp(prefix="rlpost-")  # SGLang leaves sockets behind
        environment["TMPDIR"] = self._scratch
        self._ready_fd, theirs = os.pipe()
        log_fd = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "rlpost.rollout.server", self.kind],
                stdin=subprocess.PIPE,
                stdout=log_fd,
                stderr=log_fd,
                env=environment,
                pass_fds=(theirs,),
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(log_fd)
            os.close(theirs)
        document = json.dumps({"arguments": dict(arguments), "ready_fd": theirs, "gpus_per_node": gpus_per_node})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(document.encode() + b"\n")
        except BrokenPipeError:  # it is dead already; the caller's wait says so with its log
            logger.warning("%s ended before it read its arguments", self.name)

    def wait_ready(self, deadline_s: float) -> None:
        """Return when the server has said that it is ready; it says so once, on a pipe, and its death closes the pipe.

        Raises:
            EngineDied: it ended instead; with the last lines of its log.
            RolloutError: neither happened within ``deadline_s`` seconds; with the same.
        """
        waiting = select.poll()  # not select.select: a worker process may hold more than 1024 files
        waiting.register(self._ready_fd, select.POLLIN)
        if not waiting.poll(max(0.0, deadline_s) * 1000):
            raise RolloutError(f"{self.name} is not ready after {deadline_s:.0f} s; {self.log_tail()}")
        if not os.read(self._ready_fd, 64):
            raise self.died()

    def wait_exit(self, timeout_s: float) -> bool:
        """Whether the process ended within ``timeout_s`` seconds."""
        assert self._process is not None, f"{self.name} was not started"
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def died(self) -> EngineDied:
        """The error that says how it ended."""
        code = "unknown"
        if self._process is not None and self.wait_exit(EXIT_WAIT_S):
            code = _how(self._process.returncode)
        return EngineDied(f"{self.name} ended by itself ({code}); {self.log_tail()}")

    def log_tail(self) -> str:
        """The end of the log, for an error message."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 16384))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"its log {self.log_path} cannot be read: {error}"
        last = [line for line in lines if line.strip()][-LOG_LINES:]
        return f"the end of {self.log_path}:\n" + "\n".join(f"  {line[:300]}" for line in last)

    def stop(self) -> None:
        """Kill the process and all it started; no error when it is gone already.

        Without asking first: a server has nothing to save, and SGLang takes up to ten seconds to say goodbye.

        Raises RolloutError when the kernel does not let go of it.
        """
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not self.wait_exit(KILL_WAIT_S):
            raise RolloutError(
                f"{self.name}: process {self._process.pid} is still there {KILL_WAIT_S:.0f} s after SIGKILL: its GPU's "
                "driver or a file system hangs, and the node has to be mended"
            )
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._ready_fd)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._process = None
        logger.info("%s stopped", self.name)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
