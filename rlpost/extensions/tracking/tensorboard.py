"""Write the lines of ``metrics.jsonl`` as TensorBoard events.

Input: the table [observe] and the run's folder, then one mapping per step.
Output: one file of events for each attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from common.cluster import Cluster
from common.run_identity import settle_identity
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.observe.mirrors import Write

logger = logging.getLogger(__name__)

TENSORBOARD_FLUSH_S = 30


@contextmanager
def open_mirror(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """Yield a function that adds a line; None without --use-tensorboard. Raises ConfigError."""
    if not config.observe.use_tensorboard:
        yield None
        return
    board = TensorBoardWriter(tensorboard_folder(config.observe.tensorboard_dir, run_folder))
    try:
        yield board.write
    finally:
        board.close()


def tensorboard_folder(shared: str | Path | None, run_folder: Path) -> Path:
    """Return the folder of the run's events; in a ``shared`` folder it has the run's label.

    TensorBoard shows one curve for a folder, and a new session in it hides the steps of another.
    """
    if shared is None:
        return run_folder / "tensorboard"
    return Path(shared) / settle_identity(run_folder).label


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

    def _add(self, step: int, **content: object) -> None:
        self._file.add_event(self._events.Event(wall_time=time.time(), step=step, **content))
