"""A pool of grading processes, one grading each at a time; one that times out or crashes is
replaced.

Input: which function, a prompt, its samples. Output: rewards, or ``GradingTimeout`` or ``GradingFailed``, of which
an answer may be the cause, or ``GradingLost``, of which it is not; a function that cannot even be loaded is a
``ConfigError``. The event loop never runs a grading itself, so nothing that
an answer does can stall it: a thread waits for each process. Processes start when they are first needed, one for each
grading that nobody is free for, up to the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rlpost.config.keys import without_keys
from rlpost.errors import ConfigError, GradingLost, RolloutError
from rlpost.reward.worker import LENGTH
from rlpost.types import Prompt, Sample

LOADING_TIMEOUT_S = 300.0  # imports of a reward's libraries, on a busy machine
_CLOSED = "the reward's processes are ended already"
GRACE_S = 5.0  # by which the worker's own alarm comes first

_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
"""Sent from outside: by the kernel when memory runs out, by Slurm, by a person. A crash has another signal."""

What = tuple[str, str]  # kind and name of a function, see ``worker.scorer``


class GradingTimeout(Exception):
    """A grading took longer than its limit; its process is gone."""


class GradingFailed(Exception):
    """A grading raised an error or crashed its process; the message says which."""


class WrongFunction(GradingFailed):
    """A grading raised a TypeError: odd answers may cause one; if all do, the function is wrong."""


class Pool:
    """Up to ``num_workers`` processes, with ``timeout_s`` for each grading."""

    def __init__(self, *, num_workers: int, timeout_s: float, settings: Mapping[str, Any] | None = None) -> None:
        """``settings`` are those of the run, for functions that read them (``worker.scorer``)."""
        self._timeout_s, self._settings = timeout_s, dict(settings or {})
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self._lock = threading.Lock()  # of what follows
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    async def grade(self, what: What, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        """The rewards of ``samples`` in order, all within one time limit.

        A caller that is cancelled leaves its grading to the time limit.

        Raises:
            GradingTimeout, GradingFailed, GradingLost: see there.
            ConfigError: the function cannot be imported or called, or returns no number where the settings say so.
            RolloutError: it cannot be loaded for another reason.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._grade, what, prompt, samples)

    async def close(self) -> None:
        """End all processes; what they were grading fails."""
        with self._lock:
            self._closed = True
            workers, self._all, self._idle = self._all, set(), []
        for worker in workers:
            worker.end()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _grade(self, what: What, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        worker = self._take()
        try:
            worker.load(what)
            answer = worker.ask(what, self._timeout_s, prompt, samples)
        except BaseException as failure:
            with self._lock:
                self._all.discard(worker)
            worker.end()
            if self._closed and isinstance(failure, GradingLost):
                raise RolloutError(_CLOSED) from failure  # we killed it ourselves
            raise
        with self._lock:
            self._idle.append(worker)
        if "error" in answer and answer["blame"] == "settings":
            raise ConfigError(f"{what[1]}: {answer['error']}")
        if "error" in answer and answer["blame"] == "function":
            raise WrongFunction(answer["error"])
        if "error" in answer:
            raise (GradingLost if answer["lost"] else GradingFailed)(answer["error"])
        return answer["rewards"]

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RolloutError(_CLOSED)
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive():
                    return worker
                self._all.discard(worker)  # killed while nobody used it: that costs no answer
            try:
                worker = _Worker(self._settings)
            except OSError as error:
                raise GradingLost(f"no process to grade can be started: {error}") from error
            self._all.add(worker)
            return worker


class _Worker:
    """One process and what it has loaded."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._loaded: set[What] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlpost.reward.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # with all that a reward function starts, such as a program under test
            env=without_keys(os.environ) | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already, which the first request finds out
            first = pickle.dumps(settings)
            self._process.stdin.write(LENGTH.pack(len(first)) + first)
            self._process.stdin.flush()

    def is_alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def load(self, what: What) -> None:
        """Make a function ready, with all it imports: that is no part of a grading's time."""
        if what in self._loaded:
            return
        try:
            answer = self.ask(what, LOADING_TIMEOUT_S, None, ())
        except (GradingTimeout, GradingFailed) as failure:
            raise RolloutError(f"the reward {what[1]} cannot be loaded: {failure}") from failure
        if "error" in answer:
            raise (ConfigError if answer["blame"] else RolloutError)(
                f"the reward {what[1]} cannot be loaded: {answer['error']}"
            )
        self._loaded.add(what)

    def ask(self, what: What, timeout_s: float, prompt: Prompt | None, samples: Sequence[Sample]) -> dict[str, Any]:
        """The answer to one request; without samples the function is only loaded."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # Routes are most of an answer's bytes, and no reward reads them.
        sent = tuple(sample if sample.routes is None else replace(sample, routes=None) for sample in samples)
        request = pickle.dumps((what, timeout_s, prompt, sent))
        too_late = threading.Event()

        def give_up() -> None:
            too_late.set()
            self._process.kill()

        alarm = threading.Timer(timeout_s + GRACE_S, give_up)
        alarm.start()
        try:
            self._process.stdin.write(LENGTH.pack(len(request)) + request)
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):  # the process is gone, or the pipe was closed here
            line = b""
        finally:
            alarm.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self._process.wait()
        if too_late.is_set() or code == -signal.SIGALRM:
            raise GradingTimeout(f"{what[1]}: longer than {timeout_s:g} s")
        if -code in _KILLED:
            raise GradingLost(f"{what[1]}: the process that graded was killed by {signal.Signals(-code).name}")
        raise GradingFailed(f"{what[1]}: the process that graded ended with {code}")

    def end(self) -> None:
        """Kill the process and what it has started, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was not yet written
            self._process.stdin.close()
