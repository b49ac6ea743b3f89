"""The driver: one attempt of a run, from a cluster that is up to an exit code.

In: the settings, the run's folder and the cluster that the agents brought up. Out: one of the exit codes of
``bootstrap.handoff``; metrics, checkpoints and a reward curve in the run's folder.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from bootstrap.handoff import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED, Cluster
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, DataError, Preempted, RlpostError
from rlpost.metrics.plot import plot_rewards
from rlpost.metrics.samples import SampleWriter
from rlpost.metrics.wandb import Write, mirrored
from rlpost.metrics.writer import MetricsWriter
from rlpost.orchestration.checkpoints import Checkpoints
from rlpost.orchestration.halves import make_stages
from rlpost.orchestration.loop import Loop
from rlpost.orchestration.preemption import StopRequest
from rlpost.report.write import try_to_write_report
from slurm.run_folder import RunFolder

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


def drive(config: Config, run: RunFolder, cluster: Cluster) -> int:
    """Run one attempt; returns its exit code. Errors are logged, never raised, unless they are ours to fix."""
    stop = StopRequest(cluster.stop_file)
    try:
        with mirrored(config.wandb, run.root, config.model_dump(mode="json")) as also:
            asyncio.run(_attempt(config, run, cluster, stop, also))
    except Preempted as request:
        run.ledger.append("preempted", reason=str(request))
        return EXIT_PREEMPTED
    except (ConfigError, DataError) as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    except RlpostError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    finally:
        try_to_write_report(run)
    return EXIT_DONE


async def _attempt(config: Config, run: RunFolder, cluster: Cluster, stop: StopRequest, also: Write | None) -> None:
    def committed(step: int, path: Path) -> None:
        run.ledger.append("committed", step=step, checkpoint=path.name)
        try_to_write_report(run)

    checkpoints = Checkpoints(config.checkpoint, run.checkpoints, committed=committed)
    checkpoint, state = checkpoints.newest()
    logger.info("starting from %s", checkpoint or config.checkpoint.ref_load or config.checkpoint.hf_checkpoint)
    attempt = Path(cluster.attempt_dir).name
    run.ledger.append("started", attempt=attempt, step=state.step, nodes=[node.host for node in cluster.nodes])
    stages = make_stages(config, cluster, checkpoints=checkpoints, stop=stop)
    samples = SampleWriter(run.report, num_steps=config.rollout.num_rollout, decode=stages.text)
    samples.rewind(state.step)
    metrics = MetricsWriter(run.metrics, also=also, show=samples.write)
    metrics.rewind(state.step if state.pending is None else state.step - 1)
    try:
        await stages.start(checkpoint)
        run.ledger.append("ready", attempt=attempt, step=state.step)
        loop = Loop(stages, config, rollouts=stages.rollouts(state), metrics=metrics, stop=stop)
        state = await loop.run(state, saved=checkpoint is not None)
        weights = await stages.weights_hash()
    finally:
        await stages.close()
    picture = run.report / "reward.png"
    plot_rewards(run.metrics, picture)
    run.ledger.append("done", step=state.step, weights=weights)
    logger.info("done: step %d, weights %s, %s", state.step, weights[:16], picture)
