"""Runs a server in a child process: start it, wait until it is ready or dead, stop it.

Input: the server, its arguments, the path of its log. Output: a process in a separate process
group. This process holds the other end of its standard input, so the server ends with this process
(see ``server.end_with_parent``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from common.build_tools import with_scripts
from common.cuda_runtime import with_runtime
from common.files import tail_text
from rlpost.config.keys import without_keys
from rlpost.config.sglang_variables import VARIABLES
from rlpost.errors import EngineDied, RolloutError
from rlpost.observe.memory import GB

logger = logging.getLogger(__name__)

EXIT_WAIT_S, KILL_WAIT_S = 10.0, 60.0
LOG_LINES = 30
# Proxies do not route to nodes.
PROXIES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
# Rank variables of the trainer must not reach a server, which creates separate process groups.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_INHERITED = {*_OF_RANKS, *PROXIES, *VARIABLES}
ENVIRONMENT = {
    # The driver keeps connections to engines open between generations. By default SGLang closes
    # idle connections after 5 s, so the first requests of the next step would all fail.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # DeepGEMM (FP8) compiles kernels for every number of tokens at the first start, 16,000 or more in
    # 10 to 20 minutes; with this 3,000 of them, the small numbers all.
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "1",
    # otherwise /health generates, and fails while paused
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # keep the ids of a prompt with images, instead of those of its decoded text
    "SGLANG_MM_AVOID_RETOKENIZE": "1",
}
NO_CACHE_MEMORY = "leave no GPU memory for the KV cache"  # SGLang's words, also without a GPU
NO_CACHE_REMEDY = (
    "\nremedy: weights, KV cache and other programs need more than the memory of the GPU or, without a GPU, of this "
    "machine ({free:.1f} GB free now); end other programs, lower --sglang-max-total-tokens, or raise "
    "--sglang-mem-fraction-static"
)
"""``common.error_lines.with_remedy`` shows the line."""


class ServerProcess:
    """A process ``python -m rlpost.engines.server``, called ``name`` in errors and logs."""

    def __init__(self, name: str, log_path: str | Path) -> None:
        self.name = name
        self.log_path = Path(log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        self._scratch = ""
        self._stopping = threading.Lock()

    def spawn(
        self,
        arguments: Mapping[str, object],
        *,
        gpus_per_node: int | None = None,
        ignores_term: bool = False,
    ) -> None:
        """Start the process. It reads its arguments, which include a key, from standard input.

        ``gpus_per_node``: see ``Engine.start``; ``ignores_term``: see ``Engine``.
        """
        assert self._process is None, f"{self.name} is already started"
        environment = {
            key: value
            for key, value in without_keys(os.environ).items()
            if key not in NOT_INHERITED
        }
        environment |= {key: value for key, value in ENVIRONMENT.items() if key not in environment}
        environment = with_scripts(with_runtime(environment))
        self._scratch = tempfile.mkdtemp(prefix="rlpost-")  # SGLang leaves sockets behind
        environment["TMPDIR"] = self._scratch
        self._ready_fd, theirs = os.pipe()
        log_fd = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "rlpost.engines.server"],
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
        document = json.dumps(
            {
                "arguments": dict(arguments),
                "ready_fd": theirs,
                "gpus_per_node": gpus_per_node,
                "ignores_term": ignores_term,
                "scratch": self._scratch,
            }
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(document.encode() + b"\n")
        except BrokenPipeError:  # it has exited; ``wait_ready`` reports it with its log
            logger.warning("%s ended before it read its arguments", self.name)

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server writes to its ready pipe; its exit closes the pipe.

        Raises:
            EngineDied: it exited; with the last lines of its log.
            RolloutError: neither happened within ``deadline_s`` seconds; with the same lines.
        """
        if not wait([self._ready_fd], max(0.0, deadline_s)):
            raise RolloutError(
                f"{self.name} is not ready after {deadline_s:.0f} s; {self.log_tail()}"
            )
        if not os.read(self._ready_fd, 64):
            raise self.died()

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds; return whether the process has ended."""
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
        """Return an error with the exit code and the end of the log."""
        code = "unknown"
        if self._process is not None and self.wait_exit(EXIT_WAIT_S):
            code = _how(self._process.returncode)
        tail = self.log_tail()
        remedy = ""
        if NO_CACHE_MEMORY in tail:
            free = psutil.virtual_memory().available / GB
            remedy = NO_CACHE_REMEDY.format(free=free)
        return EngineDied(f"{self.name} ended by itself ({code}); {tail}{remedy}")

    def log_tail(self) -> str:
        """Return the end of the log, for an error message."""
        try:
            lines = tail_text(self.log_path, 16_384).splitlines()
        except OSError as error:
            return f"its log {self.log_path} cannot be read: {error}"
        last = [line for line in lines if line.strip()][-LOG_LINES:]
        return f"the end of {self.log_path}:\n" + "\n".join(f"  {line[:300]}" for line in last)

    def stop(self) -> None:
        """Kill the process group with SIGKILL; do nothing if it has ended.

        No SIGTERM first: a server has nothing to save, and SGLang takes up to ten seconds to shut
        down. Two threads may call this: the one that waits for the start calls it when the process
        ends.

        Raises RolloutError when the process does not end within KILL_WAIT_S.
        """
        with self._stopping:
            self._stop()

    def _stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not self.wait_exit(KILL_WAIT_S):
            raise RolloutError(
                f"{self.name}: process {self._process.pid} is still there {KILL_WAIT_S:.0f} s after SIGKILL: its GPU "
                "driver or a file system hangs; drain and reboot the node"
            )
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._ready_fd)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._process = None
        logger.info("%s stopped", self.name)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
