"""One run: its folder, data and settings, and the attempts of the real driver.

Input: a configuration and hooks for file operations. Output: the ending and the actions of each
attempt.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from common.attempt import SECRET_FILE, STOP_FILE
from common.cluster import Cluster, Node
from common.run_folder import RunFolder
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.driver import driver, generation, stages, startup
from rlpost.driver.engines import own_engines
from rlpost.observe import memory, spans
from tests.crash_consistency import fakes
from tests.crash_consistency.interception import (
    ROOM,
    Attempt,
    Disk,
    Hook,
    Hung,
    Killed,
    intercepted,
)
from tests.crash_consistency.virtual_time import end_threads, virtual_time

NUM_STEPS, BATCH_SIZE, NUM_SAMPLES = 6, 3, 2
NUM_ROWS, BAD_ROWS = 11, (4, 8)
FILTER = "rlpost.rollout.filters.check_reward_nonzero_std"
DEADLINE_S = 20.0  # --save-deadline-s
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "eos_token_id": fakes.EOS,
}


@dataclass(frozen=True, eq=False)
class Setup:
    """A configuration: settings that differ from the plain synchronous run.

    ``save_s`` is the duration of a background save; a step takes about 0.2 s.
    """

    name: str
    rollout: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    save_s: float = 0.1
    grpo: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether nothing depends on the clock.

        An interrupted run then trains the same batches as an uninterrupted one.
        """
        more = {"over_sampling_batch_size", "partial_rollout"}
        return self.rollout.get("rollout_mode", "sync") == "sync" and not more & self.rollout.keys()


_PARTIAL = {"over_sampling_batch_size": 5, "partial_rollout": True}
_FILTER = {"dynamic_sampling_filter_path": FILTER}
_ASYNC = {"async_save": True}
_REPLAY = {"use_rollout_routing_replay": True}
SETUPS = {
    setup.name: setup
    for setup in (
        Setup("sync"),
        Setup("sync,filter", _FILTER),
        Setup("sync,partial", _PARTIAL),
        Setup("sync,replay", grpo=_REPLAY),
        Setup("sync,partial,replay", _PARTIAL, grpo=_REPLAY),
        Setup("sync,async_save", {}, _ASYNC),
        Setup("sync,slow_save", {}, _ASYNC, save_s=0.9),
        Setup("sync,keep1", {}, {"keep_last": 1, "save_interval": 1}),
        Setup("sync,keep_every", {}, {"keep_last": 1, "keep_every": 2, "save_interval": 1}),
        Setup("sync,interval", {"update_weights_interval": 2}, {"save_interval": 1}),
        Setup("one_step_off", {"rollout_mode": "one_step_off"}),
        Setup(
            "one_step_off,interval",
            {"rollout_mode": "one_step_off", "update_weights_interval": 3},
        ),
        Setup("one_step_off,filter", {"rollout_mode": "one_step_off", **_FILTER}),
        Setup("one_step_off,partial", {"rollout_mode": "one_step_off", **_PARTIAL}),
        Setup("one_step_off,slow_save", {"rollout_mode": "one_step_off"}, _ASYNC, save_s=0.9),
        Setup("fully_async", {"rollout_mode": "fully_async"}),
        Setup("fully_async,filter", {"rollout_mode": "fully_async", **_FILTER}),
        Setup("fully_async,partial", {"rollout_mode": "fully_async", "partial_rollout": True}),
        Setup(
            "fully_async,replay",
            {"rollout_mode": "fully_async", "partial_rollout": True},
            grpo=_REPLAY,
        ),
        Setup("fully_async,stale2", {"rollout_mode": "fully_async", "max_staleness": 2}),
        Setup(
            "fully_async,interval",
            {"rollout_mode": "fully_async", "max_staleness": 3, "update_weights_interval": 2},
        ),
        Setup("fully_async,async_save", {"rollout_mode": "fully_async"}, _ASYNC),
        Setup("fully_async,slow_save", {"rollout_mode": "fully_async"}, _ASYNC, save_s=0.9),
    )
}
_BELL = {"env_reward": "turn", "env_traces": False}
_BEGUN_AGAIN, _REPLAYED, _RESTORED = (
    {**_BELL, "env": [f"tests.crash_consistency.bell:{name}"]}
    for name in ("Bell", "ReplayedBell", "RestoredBell")
)
WITH_ENVIRONMENT = {
    setup.name: setup
    for setup in (
        Setup("sync,env", env=_BEGUN_AGAIN),
        Setup("sync,partial,env", _PARTIAL, env=_BEGUN_AGAIN),
        Setup("fully_async,env", {"rollout_mode": "fully_async"}, env=_BEGUN_AGAIN),
        Setup("sync,replayed", env=_REPLAYED),
        Setup("sync,partial,replayed", _PARTIAL, env=_REPLAYED),
        Setup("fully_async,replayed", {"rollout_mode": "fully_async"}, env=_REPLAYED),
        Setup("sync,restored", env=_RESTORED),
        Setup("sync,partial,restored,routes", _PARTIAL, env=_RESTORED, grpo=_REPLAY),
        Setup("fully_async,restored", {"rollout_mode": "fully_async"}, env=_RESTORED),
    )
}
"""Setups with an environment, separate from ``SETUPS``, from which the scenarios draw."""


@dataclass(frozen=True)
class Ending:
    """The ending of an attempt.

    ``how`` is done, preempted (exit code 75), refused (78), failed (1), killed, waiting (the event
    loop runs but makes no progress), hung (the event loop is blocked) or traceback.
    """

    attempt: Run
    how: str
    what: str = ""  # the error and where it was raised (traceback), or why it hung
    messages: tuple[str, ...] = ()  # warnings and errors of its log


@dataclass(eq=False)
class Run(Attempt):
    """An attempt of the driver, with the records of its fakes."""

    observed: fakes.Observed = field(default_factory=lambda: fakes.Observed(save_s=0.1))
    messages: list[str] = field(default_factory=list)


class _Log(logging.Handler):
    """Handler that adds warnings and errors to the attempt that logged them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message."""
        attempt = getattr(ROOM, "attempt", None)
        if isinstance(attempt, Run):
            attempt.messages.append(record.getMessage())


class World:
    """The folder of one run and its attempts. Use it inside ``ready``."""

    def __init__(self, base: Path, setup: Setup, seed: int = 0) -> None:
        spans.SPANS._kept.clear()  # of earlier trials in this process
        self.setup, self.rng = setup, random.Random(f"{setup.name}/{seed}")
        self.base = base
        trial = base / "trial"
        if trial.exists():
            shutil.rmtree(trial)
        self.run = RunFolder(trial / "run")
        for folder in ("attempts", "checkpoints", "report", "submitit"):
            (self.run.root / folder).mkdir(parents=True)
        self.data = trial / "prompts.jsonl"
        self.rows = rows()
        self.write_data(self.rows)
        (trial / "held.jsonl").write_text(
            "".join(_line(f"held {number}", number) for number in range(2))
        )
        self.disk = Disk(self.run.root)
        self.endings: list[Ending] = []
        self.changed: dict[str, Any] = {}

    def write_data(self, lines: Sequence[str]) -> None:
        """Replace the prompt file."""
        self.rows = list(lines)
        self.data.write_text("".join(lines))

    @property
    def config(self) -> Config:
        """The settings of the next attempt."""
        return settings(self.base, self.setup.name, json.dumps(self.changed, sort_keys=True))

    def prepare(self, hooks: Sequence[Hook] = ()) -> Run:
        """Return the next attempt without starting it."""
        number = len(list((self.run.root / "attempts").iterdir()))
        folder = self.run.attempts / str(number)
        self.disk.put_folder(folder)
        self.disk.put(folder / SECRET_FILE, b"key")
        return Run(self.disk, number, hooks, observed=fakes.Observed(save_s=self.setup.save_s))

    def stop_file(self, attempt: Run) -> Path:
        """The stop file of an attempt."""
        return self.run.attempts / str(attempt.name) / STOP_FILE

    def drive(self, attempt: Run) -> Ending:
        """Run an attempt to its end."""
        node = Node(f"n{attempt.name}", "127.0.0.1", "lo", 0)
        cluster = Cluster(
            "127.0.0.1:1", str(self.run.attempts / str(attempt.name)), (node,), 20000, 100
        )
        what = ""
        with attempt.active():
            try:
                code = driver.drive(self.config, self.run, cluster)
                how = {0: "done", 75: "preempted", 78: "refused"}.get(code, "failed")
            except (Killed, Hung):
                how, what = ("hung", attempt.hung) if attempt.hung else ("killed", "")
                how = "waiting" if attempt.waits else how
            except Exception as error:
                how, what = "traceback", _where(error)
            finally:
                attempt.is_dead = True
        for hook in attempt.hooks:
            hook.over()
        end_threads(attempt)
        self.disk.forget(attempt)
        ending = Ending(attempt, how, what, tuple(attempt.messages))
        self.endings.append(ending)
        return ending

    def attempt(self, *hooks: Hook) -> Ending:
        """Run one more attempt to its end."""
        return self.drive(self.prepare(hooks))


def _where(error: BaseException) -> str:
    """The error and the innermost function of the project that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/crash_consistency/" not in frame.filename
    ]
    ours = [
        frame for frame in frames if "/rlpost/" in frame.filename or "/slurm/" in frame.filename
    ]
    inner = (ours or frames)[-1]
    return f"{type(error).__name__}: {error} in {Path(inner.filename).name}:{inner.lineno} {inner.name}"


def _line(text: str, label: int) -> str:
    return json.dumps({"input": text, "label": str(label)}) + "\n"


def rows(count: int = NUM_ROWS, bad: Sequence[int] = BAD_ROWS) -> list[str]:
    """Return the lines of a prompt file; a bad row has an empty prompt."""
    return [_line("" if number in bad else f"question {number}", number) for number in range(count)]


@cache
def settings(base: Path, name: str, changed: str) -> Config:
    """The settings of a configuration."""
    setup, more = {**SETUPS, **WITH_ENVIRONMENT}[name], json.loads(changed)
    trial = base / "trial"
    rollout = {
        "num_rollout": NUM_STEPS,
        "rollout_batch_size": BATCH_SIZE,
        "n_samples_per_prompt": NUM_SAMPLES,
        "rollout_max_response_len": fakes.LONGEST_ANSWER,
        "prompt_data": [str(trial / "prompts.jsonl")],
        "label_key": "label",
        "rollout_shuffle": True,
        "bad_prompts": "skip",
    }
    checkpoint = {
        "hf_checkpoint": str(base / "model"),
        "save_interval": 2,
        "save_deadline_s": DEADLINE_S,
    }
    tables = {
        "rollout": {**rollout, **setup.rollout, **more.get("rollout", {})},
        "checkpoint": {**checkpoint, **setup.checkpoint, **more.get("checkpoint", {})},
        "eval": {"eval_interval": 3, "eval_prompt_data": ["held", str(trial / "held.jsonl")]},
        "grpo": {**setup.grpo, **more.get("grpo", {})},
        "optimizer": more.get("optimizer", {}),
        "env": dict(setup.env),
    }
    return load([], tables).config


class _NoReporter:
    """A reporter that does nothing: reports are not simulated, and their failures only warn."""

    def __init__(self, run: object) -> None:
        pass

    def ask(self) -> None:
        """Do nothing."""


def _token_hex(count: int = 32) -> str:
    attempt = getattr(ROOM, "attempt", None)
    if attempt is None:
        return fakes.digest(str(random.random()))[: 2 * count]
    attempt.drawn += 1
    return fakes.digest(f"{attempt.name}/{attempt.drawn}")[: 2 * count]


def _host() -> str:
    attempt = getattr(ROOM, "attempt", None)
    return "login" if attempt is None else f"n{attempt.name}"


_STAND_INS: dict[Any, dict[str, Any]] = {
    startup: {
        "connect": lambda cluster: [],
        "place": fakes.layout,
        "ports_of_run": fakes.ports,
        "order_by_gpu": lambda slots, positions: [0],
        "WorkerGroup": fakes.Actors,
        "Calls": fakes.Calls,
        "Training": fakes.Training,
    },
    stages: {
        "WeightCoordinator": fakes.WeightCoordinator,
    },
    own_engines: {
        "WorkerGroup": fakes.EngineProcess,
        "EngineClient": fakes.EngineClient,
        "check_engine": fakes.no_failure,
        "failure": fakes.no_failure,
    },
    generation: {
        "PromptTokenizer": fakes.Tokenizer,
        "tokenizer_class": lambda config: fakes.Tokenizer,
        "make_grader": fakes.Grader,
        "Connection": fakes.Connection,
    },
    driver: {
        "try_to_write_report": lambda run: None,
        "Reporter": _NoReporter,
        "LoopLag": fakes.LoopLag,
        "Loop": fakes.WatchedLoop,
    },
    memory: {"process_gb": lambda: 1.0, "machine": dict},
}


@contextmanager
def ready() -> Iterator[Path]:
    """Yield a folder for trials; attempts use fakes, virtual time and intercepted files within."""
    shared = Path("/dev/shm")
    with ExitStack() as undo:
        folder = tempfile.mkdtemp(prefix="crash-", dir=shared if shared.is_dir() else None)
        base = Path(folder).resolve()
        undo.callback(shutil.rmtree, base, ignore_errors=True)
        (base / "model").mkdir()
        for name in ("config.json", "generation_config.json"):
            (base / "model" / name).write_text(json.dumps(MODEL))
        undo.enter_context(_quiet())
        undo.callback(gc.collect)  # destructors of killed attempts
        undo.enter_context(intercepted())
        undo.enter_context(virtual_time())
        for module, replaced in _STAND_INS.items():
            for name, stand_in in replaced.items():
                undo.enter_context(mock.patch.object(module, name, stand_in))
        undo.enter_context(mock.patch("secrets.token_hex", _token_hex))
        undo.enter_context(mock.patch.object(socket, "gethostname", _host))
        yield base


@contextmanager
def _quiet() -> Iterator[None]:
    """Send log messages to the attempts, and silence destructors of killed attempts."""
    handler, logger = _Log(logging.WARNING), logging.getLogger("rlpost")
    before = logger.propagate, logger.level, sys.unraisablehook
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate, level, sys.unraisablehook = before
        logger.setLevel(level)
