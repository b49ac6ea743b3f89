"""Weights & Biases: the lines of ``metrics.jsonl`` once more, under the same names.

Input: the table [wandb], the run's folder, its settings, then one dict a step.
Output: one run there, the same after every requeue, since its id is kept in RUN/wandb/run_id. The
key is the variable WANDB_API_KEY of this process. If W&B is unreachable training continues:
``metrics.jsonl`` has everything, and ``wandb sync`` sends what stayed here.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.files import write_atomic
from rlpost.config.groups.wandb import WandbConfig
from rlpost.errors import ConfigError, Preempted

logger = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, float]], None]
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0  # a preempted run has more important things to do
MAX_NAME = 60


class WandbWriter:
    """One run at W&B. Raises ConfigError when it cannot begin; afterwards nothing raises."""

    def __init__(self, settings: WandbConfig, run_folder: Path, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb  # only here: a run without it needs no such package
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"wandb.use_wandb = true (--use-wandb): {error}; pip install wandb on the nodes, or leave it out"
            ) from None
        self._teardown = wandb.teardown
        identity = run_id(run_folder)
        begin = functools.partial(
            wandb.init,
            project=settings.wandb_project,
            group=settings.wandb_group,
            name=run_folder.name,
            id=identity,
            resume="allow",
            dir=run_folder,
            config=dict(run_config),
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )
        try:
            self._run = begin(mode=settings.wandb_mode)
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
            raise ConfigError(
                f"wandb.use_wandb = true (--use-wandb): {error}; give a key with --wandb-key or WANDB_API_KEY, or use "
                "--wandb-mode offline"
            ) from error
        except wandb.errors.CommError as error:
            logger.warning("wandb: cannot be reached, this attempt stays in %s: %s", run_folder / "wandb", error)
            wandb.teardown()  # its process still holds the run that could not begin
            self._run = begin(mode="offline")
        # W&B counts its own steps, which only ever rise; after a resume ours begin before the last that was sent.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        where = f"offline in {run_folder / 'wandb'}" if self._run.offline else self._run.url
        logger.info("wandb: run %s, %s", identity, where)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the line of ``step``; returns at once."""
        try:
            self._run.log({"step": step, **metrics})
        except Exception as error:  # whatever becomes of W&B, the run goes on
            logger.warning("wandb: step %d was not sent: %s", step, error)

    def finish(self, error: BaseException | None) -> None:
        """Send what is left, for FINISH_TIMEOUT_S at most, and say how this attempt ended."""
        try:
            if isinstance(error, Preempted):
                self._run.mark_preempting()
            self._run.finish(exit_code=0 if error is None else 1)
            self._teardown()  # the files are whole only when W&B's own process has ended
        except Exception as problem:
            logger.warning("wandb: not finished: %s", problem)


@contextmanager
def mirrored(settings: WandbConfig, run_folder: Path, run_config: Mapping[str, Any]) -> Iterator[Write | None]:
    """What takes the lines of an attempt to W&B, or None where that is off. Raises ConfigError."""
    if not settings.is_on:
        yield None
        return
    writer = WandbWriter(settings, run_folder, run_config)
    try:
        yield writer.write
    except BaseException as error:
        writer.finish(error)
        raise
    writer.finish(None)


def run_id(run_folder: Path) -> str:
    """The run's name at W&B for good: that of its folder and a hash of when it was made, so that a folder of the same
    name later is another run."""
    path = run_folder / "wandb" / "run_id"
    if path.exists():
        return path.read_text().strip()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", run_folder.name)[:MAX_NAME]
    made = (run_folder / "run.json").stat().st_mtime_ns
    identity = f"{name}-{hashlib.sha256(f'{run_folder}:{made}'.encode()).hexdigest()[:8]}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, identity + "\n")
    return identity
