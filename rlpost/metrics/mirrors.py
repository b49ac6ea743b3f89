"""Where the lines of ``metrics.jsonl`` go besides: Weights & Biases, TensorBoard, Prometheus; whichever are on.

Input: settings and places of an attempt.
Output: one function that takes each line to all of them, while the block lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.cluster import Cluster
from rlpost.config.tree import Config
from rlpost.metrics.prometheus import PrometheusServer
from rlpost.metrics.tensorboard import TensorBoardWriter
from rlpost.metrics.wandb import Write, mirrored


@contextmanager
def mirrors(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """What takes the lines of an attempt elsewhere, or None where nothing is on. Prometheus asks at the last port of
    the job's block, where the settings name none, and shows the attempt's secret. Raises ConfigError."""
    settings = config.observe
    writes: list[Write] = []
    with ExitStack() as open_ones:
        if settings.use_tensorboard:
            board = TensorBoardWriter(Path(settings.tensorboard_dir or run_folder / "tensorboard"))
            open_ones.callback(board.close)
            writes.append(board.write)
        if settings.use_prometheus:
            port = settings.prometheus_port or cluster.port_base + cluster.port_count - 1
            server = PrometheusServer(settings.prometheus_host, port, token=cluster.secret, run=run_folder.name)
            open_ones.callback(server.close)
            writes.append(server.write)
        wandb = open_ones.enter_context(mirrored(config.wandb, run_folder, config.model_dump(mode="json")))
        if wandb is not None:
            writes.append(wandb)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for one in writes:
                one(step, metrics)

        yield write if writes else None
