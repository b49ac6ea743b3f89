"""Run engines and functions in forks of one process that imported SGLang.

The import takes most of the processor time of an engine's start. ``python -m
tests.contract.forked.forked_sglang`` imports once. Each line of its standard input is JSON:

- an object that describes an engine. The process forks another that runs
  ``rlpost.engines.server.run_engine``, and answers ``true`` when the engine accepts requests, or
  ``false`` if it ends before that. One engine runs at a time.
- ``null`` stops the current engine. The answer is ``true``.
- a string with a pickled call. The answer is a string with its pickled result, or an object with
  the traceback of what it raised.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from rlpost.engines import server
from rlpost.engines.process import ENVIRONMENT, NOT_INHERITED
from rlpost.extensions.on_cpu.engine import use_stand_ins
from rlpost.types import EngineAddress
from tests.contract.conftest import ROOT, START_DEADLINE_S
from tests.engines_on_cpu import use_plugins
from tests.ports import free_ports

Result = TypeVar("Result")


class ForkedSglang:
    """Starts engines and calls functions in forks of a process that ends with the context."""

    def __init__(self, log: Path) -> None:
        self.scratch = tempfile.mkdtemp(prefix="rlpost-")  # SGLang leaves sockets behind
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.forked.forked_sglang"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd=ROOT,
                env=inherited | ENVIRONMENT | {"TMPDIR": self.scratch},
                text=True,
                bufsize=1,
            )

    def __enter__(self) -> ForkedSglang:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # at the end of input it kills its engine and exits
        self.process.wait(60)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def start(
        self,
        model: Path,
        api_key: str,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        **server_args: object,
    ) -> EngineAddress:
        """Start an engine of a model folder, without a tokenizer.

        ``environment`` are variables that it has beside those of all engines.
        """
        port = free_ports(1)[0]
        arguments = {
            "host": "127.0.0.1",
            "port": port,
            "model_path": str(model),
            "api_key": api_key,
            "weight_version": "0",
            "skip_tokenizer_init": True,
            **server_args,
        }
        document = {"arguments": arguments, "log": str(log), "environment": dict(environment or {})}
        is_ready = self._ask(document)
        assert is_ready, f"the engine of {model} ended:\n{log.read_text()[-6000:]}"
        return EngineAddress(url=f"http://127.0.0.1:{port}", num_gpus=1)

    def stop(self) -> None:
        """Stop the engine, if one is running."""
        self._ask(None)

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Return ``function(*arguments)``, called in a new process.

        The function must be one of a module, and its arguments and result picklable.
        """
        answer = self._ask(pickle.dumps((function, arguments)).hex())
        assert isinstance(answer, str), answer["traceback"]
        result: Result = pickle.loads(bytes.fromhex(answer))
        return result

    def _ask(self, document: dict[str, Any] | str | None) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(document) + "\n")
        assert wait([stdout], START_DEADLINE_S), f"no answer within {START_DEADLINE_S:.0f} s"
        return json.loads(stdout.readline())


class Forked:
    """An engine's process in its own process group; it ends when this process does."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.ready, ready = os.pipe()
        stdin, self.stdin = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(ready)
            os.close(stdin)
            return
        try:
            os.setsid()
            log = os.open(document["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for theirs, number in ((stdin, 0), (log, 1), (log, 2)):
                os.dup2(theirs, number)
            for descriptor in (stdin, log, self.ready, self.stdin):
                os.close(descriptor)
            del os.environ["SGLANG_CPU_OMP_THREADS_BIND"]  # run_engine sets it for its ranks
            os.environ.update(document["environment"])
            server.not_in_children(ready)
            server.end_with_parent()
            server.run_engine(document["arguments"], ready)
        finally:
            os._exit(1)

    def is_ready(self) -> bool:
        """Wait until the engine accepts requests; return False if it ends before."""
        return bool(os.read(self.ready, 64))

    def stop(self) -> None:
        """Kill the process group."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.ready)
        os.close(self.stdin)


def called(call: str) -> str:
    """Call a pickled function with its arguments; return the pickled result."""
    function, arguments = pickle.loads(bytes.fromhex(call))
    return pickle.dumps(function(*arguments)).hex()


def in_fork(call: str) -> str | dict[str, str]:
    """Make a pickled call in a forked process, and return what it answers."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        try:
            return process.submit(called, call).result(START_DEADLINE_S)
        except Exception:
            return {"traceback": traceback.format_exc()}


def main() -> None:
    """Answer each line of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep what SGLang prints out of the answers
    use_stand_ins()
    use_plugins()
    import sglang.srt.entrypoints.http_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.models.registry  # noqa: F401, all models, after the plugins

    running: Forked | None = None
    for line in sys.stdin:
        document = json.loads(line)
        if isinstance(document, str):
            answers.write(json.dumps(in_fork(document)) + "\n")
            continue
        if running is not None:
            running.stop()
        running = None if document is None else Forked(document)
        answers.write(json.dumps(running is None or running.is_ready()) + "\n")
    if running is not None:
        running.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
