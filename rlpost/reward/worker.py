"""A process that grades: what may hang or crash does so here.

Input, on standard input: pickled requests, each after its length. Output, on what was standard output: one line
of JSON for each. First a request names the function and the worker answers when it is loaded; then each grading has a
time limit, kept by the kernel: SIGALRM ends the process, whatever it is doing and whether or not anybody waits for it.
The end of the input ends the worker.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from rlpost.algorithm.plugin import WRONG_CODE, checked_interface, load_function
from rlpost.compat.slime.filters import reward_number
from rlpost.compat.slime.rewards import one, several
from rlpost.compat.slime.signatures import Kind
from rlpost.errors import ConfigError, GradingLost
from rlpost.reward.registry import reward_function
from rlpost.types import Prompt, Sample

LENGTH = struct.Struct(">Q")
MAX_MEMORY = 4 << 30  # bytes of address space for one of our own rewards; a user's function may need more
LIBRARIES = {"deepscaler": ("sympy", "pylatexenc.latex2text"), "math": ("math_verify",), "ifeval": ("langdetect",)}

_LOST_CONNECTION = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError)
"""Not BrokenPipeError: a program under test that does not read its input causes it."""
_LONGEST_CHAIN = 20  # causes of one error
_loop = asyncio.Runner()  # of all calls: what a function opens in one it may use in the next

Score = Callable[[Prompt, Sequence[Sample]], list[float]]


def scorer(kind: str, name: str, settings: Mapping[str, Any]) -> Score:
    """The function of a kind: ``rm`` (a reward by name), ``custom`` (a user's, for one sample) or ``group``.

    ``settings`` are those of the run (``rlpost.compat.slime.arguments.settings_of``), for a function of slime.

    Raises:
        ConfigError: there is none of that name, or it cannot be imported.
        ImportError: a library that a reward needs is not installed.
    """
    if kind == "rm":
        for library in LIBRARIES.get(name.removeprefix("boxed_"), ()):
            importlib.import_module(library)
        score = reward_function(name)
        return lambda prompt, samples: [_number(score(s.text, prompt.label, prompt.metadata)) for s in samples]
    function = load_function(name, key="--custom-rm-path")
    what: Kind = "reward" if kind == "custom" else "group reward"
    key = settings.get("reward_key")
    if checked_interface(what, function, key="--custom-rm-path", path=name) == "slime":
        function = (one if kind == "custom" else several)(function, settings)
    if kind == "custom":
        return lambda prompt, samples: [_number(_result(function(prompt, sample)), key) for sample in samples]

    def group(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        rewards = list(_result(function(prompt, samples)))
        if len(rewards) != len(samples):
            raise ValueError(f"{len(rewards)} rewards for a group of {len(samples)} samples")
        return [_number(reward, key) for reward in rewards]

    return group


def _result(given: Any) -> Any:
    async def wait() -> Any:
        return await given

    return _loop.run(wait()) if inspect.isawaitable(given) else given


def _number(reward: Any, key: str | None = None) -> float:
    number = reward_number(reward, key)
    if not math.isfinite(number):
        raise ValueError(f"a reward of {number}")
    return number


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward function prints belongs to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarms are off
    loaded: dict[tuple[str, str], Score] = {}
    settings = _read(sys.stdin.buffer) or {}
    while (request := _read(sys.stdin.buffer)) is not None:
        what, timeout_s, prompt, samples = request
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            if what not in loaded:
                loaded[what] = scorer(what[0], what[1], settings)
            answer: dict[str, Any] = {"rewards": loaded[what](prompt, samples) if samples else []}
        except Exception as error:  # a user's function, or sympy on hostile text: anything
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "lost": _is_lost(error)}
            answer["blame"] = _blame(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if what[0] == "rm" and not samples:
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _blame(error: Exception) -> str | None:
    """``settings`` for what no answer can cause, ``function`` for what the function is to blame for if it always is."""
    if isinstance(error, ImportError | ConfigError):
        return "settings"
    return "function" if isinstance(error, WRONG_CODE) else None


def _is_lost(error: BaseException) -> bool:
    """Whether a function failed because something that it needs is away: it raised GradingLost, or a connection
    failed, which HTTP libraries report as an error of their own whose cause that is."""
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(found, GradingLost) or type(found) in _LOST_CONNECTION:
            return True
        found = None if found is None else found.__cause__ or found.__context__
    return False


def _read(stream: BinaryIO) -> Any:
    """The next request, or None at the end of the input."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


if __name__ == "__main__":
    main()
