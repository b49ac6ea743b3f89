"""Log the lines of ``metrics.jsonl`` to Weights & Biases, under the same names.

Input: the table [wandb], the run's folder, its settings, then one mapping per step.
Output: one W&B run, which every requeue resumes: its id is the label of the run's identity. The key is read from
WANDB_API_KEY of this process. If W&B is unreachable, training continues: ``metrics.jsonl`` is
complete, and ``wandb sync`` uploads the local files later.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.run_identity import settle_identity
from rlpost.config.groups.wandb import WandbConfig
from rlpost.errors import ConfigError, Preempted

logger = logging.getLogger(__name__)

Write = Callable[[int, Mapping[str, float]], None]
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0  # short: a preempted run has little time left


class WandbWriter:
    """One W&B run. The constructor raises ConfigError; later failures are only logged."""

    def __init__(
        self, settings: WandbConfig, run_folder: Path, run_config: Mapping[str, object]
    ) -> None:
        try:
            import wandb  # here, because the package is optional
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"wandb.use_wandb = true (--use-wandb): {error}; pip install wandb on the nodes, or leave it out"
            ) from None
        self._teardown = wandb.teardown
        identity = settle_identity(run_folder).label
        server = {} if settings.wandb_host is None else {"base_url": settings.wandb_host}
        begin = functools.partial(
            wandb.init,
            project=settings.wandb_project,
            entity=settings.wandb_team,
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
                **server,
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
            logger.warning(
                "wandb: cannot be reached, this attempt stays in %s: %s",
                run_folder / "wandb",
                error,
            )
            wandb.teardown()  # its service process still holds the failed run
            self._run = begin(mode="offline")
        # W&B's internal step only increases, but a resume may restart below the last step sent.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        where = f"offline in {run_folder / 'wandb'}" if self._run.offline else self._run.url
        logger.info("wandb: run %s, %s", identity, where)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the line of ``step``; returns immediately."""
        try:
            self._run.log({"step": step, **metrics})
        except Exception as error:  # a failing mirror must not end the run
            logger.warning("wandb: step %d was not sent: %s", step, error)

    def finish(self, error: BaseException | None) -> None:
        """Upload pending data within FINISH_TIMEOUT_S and set the final state of the attempt."""
        try:
            if isinstance(error, Preempted):
                self._run.mark_preempting()
            self._run.finish(exit_code=0 if error is None else 1)
            self._teardown()  # the files are complete only once W&B's service process has ended
        except Exception as problem:
            logger.warning("wandb: not finished: %s", problem)


@contextmanager
def mirrored(
    settings: WandbConfig, run_folder: Path, run_config: Mapping[str, object]
) -> Iterator[Write | None]:
    """Yield a function that logs one line to W&B; None if W&B is disabled. Raises ConfigError."""
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
