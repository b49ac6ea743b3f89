"""A grading process, which isolates functions that may hang or crash.

Input: modules that adapt foreign functions as arguments (``rlpost.algorithm.plugin``), and pickled
requests on standard input, each after its length. Output: one line of JSON for each
on the original standard output.

The first request for a function loads it without samples, so that imports do not count as grading
time. Each grading has a time limit enforced by the kernel: SIGALRM ends the process in any state,
also when its parent has ended. The worker ends at the end of its input.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

from rlpost.algorithm.plugin import (
    WRONG_CODE,
    checked_interface,
    foreign_adapters,
    load_function,
    register_modules,
)
from rlpost.algorithm.signatures import Kind, signature_of_object, takes_engines
from rlpost.errors import ConfigError, GradingLost
from rlpost.tasks.reward.registry import reward_function
from rlpost.tasks.reward.reward_number import reward_number
from rlpost.types import Prompt, Sample

LENGTH = struct.Struct(">Q")
MAX_MEMORY = 4 << 30  # bytes of address space for a reward by name; a user's function may need more

_LOST_CONNECTION = (ConnectionRefusedError, ConnectionResetError, ConnectionAbortedError)
"""Not BrokenPipeError: a program under test that does not read its input causes it."""
_LONGEST_CHAIN = 20  # causes of one error
# shared by all calls, so that a function can keep an HTTP session open between them
_loop = asyncio.Runner()

T = TypeVar("T")
Score = Callable[[Prompt, Sequence[Sample]], list[float]]


def scorer(kind: str, name: str, settings: Mapping[str, Any]) -> Score:
    """Load ``rm`` (a reward by name), ``custom`` (a user's, for one sample), or ``group``.

    ``settings`` are those of the run (``rlpost.config.plugin_settings.settings_of``), for slime
    functions.

    Raises:
        ConfigError: there is no such function, or it cannot be imported.
        ImportError: a library that the reward needs is not installed.
    """
    if kind == "rm":
        score = reward_function(name)

        def by_name(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
            return [
                _number(score(sample.text, prompt.label, prompt.metadata)) for sample in samples
            ]

        return by_name
    function = load_function(name, key="--custom-rm-path")
    what: Kind = "reward" if kind == "custom" else "group reward"
    key, weights = settings.get("reward_key"), settings.get("reward_weights")
    signature = signature_of_object(function)
    if signature is not None and takes_engines(what, signature):
        raise ConfigError(
            f"--custom-rm-path {name}: a function that takes engines is called in the driver, which "
            "finds it in the source: define it with async def in this module, without decorators"
        )
    if checked_interface(what, function, key="--custom-rm-path", path=name) == "slime":
        adapters = foreign_adapters()
        function = adapters.adapt(what, function, adapters.arguments(settings))
    if kind == "custom":

        def custom(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
            return [_number(_result(function(prompt, sample)), key, weights) for sample in samples]

        return custom

    def group(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
        rewards = list(_result(function(prompt, samples)))
        if len(rewards) != len(samples):
            raise ValueError(f"{len(rewards)} rewards for a group of {len(samples)} samples")
        return [_number(reward, key, weights) for reward in rewards]

    return group


def _result(given: Awaitable[T] | T) -> T:
    """Return the value of a call, awaited if the function is asynchronous."""

    if not inspect.isawaitable(given):
        return given

    async def wait() -> T:
        return await given

    return _loop.run(wait())


def _number(
    reward: object, key: str | None = None, weights: Mapping[str, float] | None = None
) -> float:
    number = reward_number(reward, key, weights)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}; it must be finite")
    return number


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of reward functions goes to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # suppress the warning that its own alarms are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    loaded: dict[tuple[str, str], Score] = {}
    register_modules(sys.argv[1:])
    settings = _read(sys.stdin.buffer) or {}
    while (request := _read(sys.stdin.buffer)) is not None:
        what, timeout_s, prompt, samples = request
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            if what not in loaded:
                loaded[what] = scorer(what[0], what[1], settings)
            answer: dict[str, object] = {
                "rewards": loaded[what](prompt, samples) if samples else []
            }
        except Exception as error:  # a user's function, or sympy, may raise any type
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "lost": is_lost(error)}
            answer["blame"] = _blame(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if what[0] == "rm" and not samples:
            resource.setrlimit(
                resource.RLIMIT_AS, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1])
            )
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _blame(error: Exception) -> str | None:
    """Return "settings" if no answer can cause the error, "function" if the function may."""
    if isinstance(error, ImportError | ConfigError):
        return "settings"
    return "function" if isinstance(error, WRONG_CODE) else None


def is_lost(error: BaseException) -> bool:
    """Whether a function failed because a dependency is unavailable.

    Either it raised GradingLost, or a connection failed, which HTTP libraries wrap in their own
    errors as the cause.
    """
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(found, GradingLost) or type(found) in _LOST_CONNECTION:
            return True
        found = None if found is None else found.__cause__ or found.__context__
    return False


def _read(stream: BinaryIO) -> Any:
    """Return the next request, or None at the end of the input."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return pickle.loads(stream.read(LENGTH.unpack(head)[0]))


if __name__ == "__main__":
    main()
