"""The driver: one attempt of a run, from a cluster that is up to an exit code.

In: the settings, the run's folder and the cluster that the agents brought up. Out: one of the exit codes of
``bootstrap.handoff``; metrics, checkpoints and a reward curve in the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bootstrap.handoff import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED, Cluster
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, DataError, Preempted, RlpostError
from rlpost.metrics.plot import plot_rewards
from rlpost.metrics.writer import MetricsWriter
from rlpost.orchestration.checkpoints import Checkpoints
from rlpost.orchestration.loop import Loop
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.stages import ClusterStages, initial_cursor

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


def drive(config: Config, run_folder: Path, cluster: Cluster) -> int:
    """Run one attempt; returns its exit code. Errors are logged, never raised, unless they are ours to fix."""
    stop = StopRequest(cluster.stop_file)
    try:
        asyncio.run(_attempt(config, run_folder, cluster, stop))
    except Preempted as request:
        record(run_folder, "preempted", reason=str(request))
        return EXIT_PREEMPTED
    except (ConfigError, DataError) as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    except RlpostError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    return EXIT_DONE


async def _attempt(config: Config, run_folder: Path, cluster: Cluster, stop: StopRequest) -> None:
    def committed(step: int, path: Path) -> None:
        record(run_folder, "committed", step=step, checkpoint=path.name)

    checkpoints = Checkpoints(config.checkpoint, run_folder, committed=committed)
    checkpoint, state = checkpoints.newest()
    logger.info(
        "starting %s", f"from {config.checkpoint.hf_checkpoint}" if checkpoint is None else f"from {checkpoint}"
    )
    record(run_folder, "started", attempt=cluster.attempt_dir, step=state.step, nodes=[n.host for n in cluster.nodes])
    metrics = MetricsWriter(run_folder / "metrics.jsonl")
    metrics.rewind(state.step if state.pending is None else state.step - 1)
    stages = ClusterStages(config, cluster, checkpoints=checkpoints, stop=stop)
    try:
        await stages.start(checkpoint)
        loop = Loop(stages, config, cursor=initial_cursor(stages, config, state), metrics=metrics, stop=stop)
        state = await loop.run(state, saved=checkpoint is not None)
        weights = await stages.weights_hash()
    finally:
        stages.close()
    plot_rewards(run_folder / "metrics.jsonl", run_folder / "report" / "reward.png")
    record(run_folder, "done", step=state.step, weights=weights)
    logger.info("done: step %d, weights %s, %s", state.step, weights[:16], run_folder / "report" / "reward.png")


def record(run_folder: Path, event: str, **details: Any) -> None:
    """Append one line to the run's ledger."""
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **details})
    with (run_folder / "ledger.jsonl").open("a") as file:
        file.write(line + "\n")
