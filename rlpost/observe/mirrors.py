"""Mirror the lines of ``metrics.jsonl`` to Weights & Biases, TensorBoard and Prometheus.

Input: the settings, run folder and cluster of an attempt.
Output: a function that writes a line to every enabled mirror, valid inside the context.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

from common.cluster import Cluster
from common.run_identity import settle_identity
from common.scrape_targets import DRIVER_TARGETS
from rlpost import __version__
from rlpost.config.masking import masked
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.observe.prometheus import PrometheusServer
from rlpost.observe.wandb import Write, mirrored

logger = logging.getLogger(__name__)

TENSORBOARD_FLUSH_S = 30


@contextmanager
def mirrors(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """Yield a function that writes one line to all enabled mirrors; None if none is enabled.

    Without --prometheus-port, Prometheus is served at the last port of the job's block. A scrape
    must present the attempt's secret. Raises ConfigError.
    """
    settings = config.observe
    writes: list[Write] = []
    with ExitStack() as open_ones:
        if settings.use_tensorboard:
            board = TensorBoardWriter(tensorboard_folder(settings.tensorboard_dir, run_folder))
            open_ones.callback(board.close)
            writes.append(board.write)
        if settings.use_prometheus:
            port = settings.prometheus_port or cluster.port_base + cluster.port_count - 1
            server = PrometheusServer(
                settings.prometheus_host,
                port,
                token=cluster.secret,
                run=run_folder.name,
                about=about(config, cluster, os.environ),
                targets=run_folder / DRIVER_TARGETS,
            )
            open_ones.callback(server.close)
            writes.append(server.write)
        wandb = open_ones.enter_context(
            mirrored(config.wandb, run_folder, masked(config.model_dump(mode="json")))
        )
        if wandb is not None:
            writes.append(wandb)

        refused: set[str] = set()

        def write(step: int, metrics: Mapping[str, float]) -> None:
            values = numbers(metrics)
            for name in metrics.keys() - values.keys() - refused:
                refused.add(name)
                logger.warning(
                    "metric %s is %.60r, no number: no mirror has it", name, metrics[name]
                )
            for one in writes:
                one(step, values)

        yield write if writes else None


def tensorboard_folder(shared: str | Path | None, run_folder: Path) -> Path:
    """Return the folder of the run's events; in a ``shared`` folder it has the run's label.

    TensorBoard shows one curve for a folder, and a new session in it hides the steps of another.
    """
    if shared is None:
        return run_folder / "tensorboard"
    return Path(shared) / settle_identity(run_folder).label


def numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics that are numbers: a mirror may fail on a whole line for one other value.

    >>> numbers({"a": 1, "b": "1", "c": None, "d": float("nan")})
    {'a': 1.0, 'd': nan}
    """
    return {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}


def about(config: Config, cluster: Cluster, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that identify an attempt: attempt, job, model and version."""
    return {
        "attempt": Path(cluster.attempt_dir).name,
        "job": environ.get("SLURM_JOB_ID", ""),
        "model": Path(config.checkpoint.hf_checkpoint).name,
        "version": __version__,
    }


class TensorBoardWriter:
    """The lines as TensorBoard events of one attempt. Only the constructor raises (ConfigError).

    The first event of its file is a ``SessionLog.START``, which makes TensorBoard discard events of
    older files from this step on (``purge_step`` of torch's SummaryWriter), so each step appears
    once, also after a resume.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"observe.use_tensorboard = true (--use-tensorboard): {error}; pip install tensorboard on the nodes, "
                "or leave it out"
            ) from None
        self._events, self._summaries = event_pb2, summary_pb2
        try:
            self._file = EventFileWriter(str(folder), flush_secs=TENSORBOARD_FLUSH_S)
        except OSError as error:
            raise ConfigError(f"--tensorboard-dir {folder}: {error}") from error
        self._begun = False
        logger.info("tensorboard: events in %s", folder)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the line of ``step``."""
        try:
            if not self._begun:
                self._add(
                    step, session_log=self._events.SessionLog(status=self._events.SessionLog.START)
                )
                self._begun = True
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=float(x))
                for name, x in metrics.items()
            ]
            self._add(step, summary=self._summaries.Summary(value=values))
        except Exception as error:  # a failing mirror must not end the run
            logger.warning("tensorboard: step %d was not written: %s", step, error)

    def close(self) -> None:
        """Flush all events and close the file."""
        try:
            self._file.close()
        except Exception as error:
            logger.warning("tensorboard: not closed: %s", error)

    def _add(self, step: int, **content: Any) -> None:
        self._file.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
