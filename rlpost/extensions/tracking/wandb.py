"""Log the lines of ``metrics.jsonl`` to Weights & Biases, under the same names.

Input: the table [wandb], the run's folder, its settings, then one mapping per step.
Output: one W&B run, which every requeue resumes: its id is the label of the run's identity. The key
is read from WANDB_API_KEY of this process. All calls of W&B are made in one thread, so they neither
delay nor end the training: if W&B fails to start, the attempt is written offline, for ``wandb
sync``; if that fails too, ``metrics.jsonl`` has all lines.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from common.cluster import Cluster
from common.installed import is_package
from common.run_folder import RunFolder
from common.run_identity import settle_identity
from rlpost.cli.secret_file import has_key
from rlpost.config.groups.wandb import MAX_LENGTH, WandbConfig
from rlpost.config.keys import WANDB
from rlpost.config.masking import masked, without_secrets
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, Preempted
from rlpost.observe.mirrors import Write

logger = logging.getLogger(__name__)

Mode = Literal["online", "offline", "disabled"]
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 30.0  # short: a preempted run has little time left
PREEMPTED_S, END_S = FINISH_TIMEOUT_S + 10, FINISH_TIMEOUT_S + 90
"""Wait of ``finish`` at a preemption, and at another end, where W&B may still be starting."""
MAX_PENDING = 10_000
"""Lines that wait for W&B, some 5 kB each; further ones are in ``metrics.jsonl`` alone."""
MAX_ERROR = 300
KEY_REMEDY = "; give a key with --wandb-key or WANDB_API_KEY"


class WandbWriter:
    """One W&B run. The constructor raises ConfigError without the package; failures are logged."""

    def __init__(
        self, settings: WandbConfig, run_folder: Path, run_config: Mapping[str, object], mode: Mode
    ) -> None:
        if not is_package("wandb"):
            raise ConfigError(
                "wandb.use_wandb = true (--use-wandb): No module named 'wandb'; pip install wandb on the nodes, or "
                "leave it out"
            )
        self._settings, self._mode = settings, mode
        self._run_folder, self._run_config = run_folder, run_config
        self._lines: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MAX_PENDING)
        self._error: BaseException | None = None
        self._is_full = False
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the line of ``step``; returns immediately."""
        if not self._thread.is_alive():
            return
        try:
            self._lines.put_nowait((step, metrics))
        except queue.Full:
            if not self._is_full:
                logger.warning("wandb: it does not accept lines; those from step %d are lost", step)
            self._is_full = True

    def finish(self, error: BaseException | None) -> None:
        """Upload pending data within a deadline and set the final state of the attempt."""
        self._error = error
        deadline_s = PREEMPTED_S if isinstance(error, Preempted) else END_S
        with suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning("wandb: not finished within %.0f s", deadline_s)

    def _work(self) -> None:
        """Start the run, log the lines in order and finish it; the thread's function."""
        try:
            run = self._start()
        except Exception as error:
            logger.warning("wandb: %s; the metrics are in metrics.jsonl alone", _one_line(error))
            return
        while (line := self._lines.get()) is not None:
            step, metrics = line
            try:
                run.log({"step": step, **metrics})
            except Exception as error:
                logger.warning("wandb: step %d was not sent: %s", step, _one_line(error))
        try:
            if isinstance(self._error, Preempted):
                run.mark_preempting()
            run.finish(exit_code=0 if self._error is None else 1)
            _teardown()  # the files are complete only once W&B's service process has ended
        except Exception as problem:
            logger.warning("wandb: not finished: %s", _one_line(problem))

    def _start(self) -> Any:
        """Return the W&B run, offline if it cannot be online. Raises what W&B raises."""
        try:
            run = self._begin(self._mode)
        except Exception as error:  # of any package: sockets, pydantic, W&B's helper process
            remedy = KEY_REMEDY if type(error).__name__ == "AuthenticationError" else ""
            logger.warning(
                "wandb: %s%s; this attempt stays in %s, and wandb sync uploads it",
                _one_line(error),
                remedy,
                self._run_folder / "wandb",
            )
            with suppress(Exception):
                _teardown()  # its service process still holds the failed run
            run = self._begin("offline")
        # W&B's internal step only increases, but a resume may restart below the last step sent.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        where = f"offline in {self._run_folder / 'wandb'}" if run.offline else run.url
        logger.info("wandb: run %s, %s", run.id, where)
        return run

    def _begin(self, mode: Mode) -> Any:
        import wandb  # here, because the package is optional

        settings, host = self._settings, self._settings.wandb_host
        server = {} if host is None else {"base_url": host}
        return wandb.init(
            mode=mode,
            project=settings.wandb_project,
            entity=settings.wandb_team,
            group=settings.wandb_group,
            name=self._run_folder.name[:MAX_LENGTH],
            id=settle_identity(self._run_folder).label,
            resume="allow",
            dir=self._run_folder,
            config=dict(self._run_config),
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                **server,
            ),
        )


def _teardown() -> None:
    import wandb

    wandb.teardown()


def _one_line(error: Exception) -> str:
    """Return an error of W&B as one line without passwords."""
    words = without_secrets(" ".join(str(error).split()))
    return f"{type(error).__name__}: {words[:MAX_ERROR]}".rstrip(": ")


@contextmanager
def open_mirror(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """Yield a function that logs one line to W&B; None if W&B is disabled. Raises ConfigError."""
    with mirrored(config.wandb, run_folder, masked(config.model_dump(mode="json"))) as write:
        yield write


def check_key(config: Config, run: RunFolder) -> None:
    """Raise ConfigError if a run that logs online would have no key."""
    if (
        config.wandb.is_on
        and config.wandb.mode_in(os.environ) == "online"
        and not has_wandb_key(run, os.environ)
    ):
        raise ConfigError(
            "--use-wandb true: no key for Weights & Biases; give --wandb-key, export WANDB_API_KEY, or use "
            "--wandb-mode offline"
        )


def has_wandb_key(run: RunFolder, environ: Mapping[str, str]) -> bool:
    """Return whether ``environ``, the run's file or ~/.netrc has a key for Weights & Biases."""
    if has_key(run, environ, WANDB):
        return True
    netrc = Path(environ.get("HOME", "/")) / ".netrc"
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


@contextmanager
def mirrored(
    settings: WandbConfig, run_folder: Path, run_config: Mapping[str, object]
) -> Iterator[Write | None]:
    """Yield a function that logs one line to W&B; None if W&B is disabled. Raises ConfigError."""
    mode = settings.mode_in(os.environ)
    if not settings.is_on or mode == "disabled":
        yield None
        return
    writer = WandbWriter(settings, run_folder, run_config, mode)
    try:
        yield writer.write
    except BaseException as error:
        writer.finish(error)
        raise
    writer.finish(None)
