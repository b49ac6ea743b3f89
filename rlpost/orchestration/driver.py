"""The driver: one attempt of a run, from a cluster that is up to an exit code.

In: the settings, the run's folder and the cluster that the agents brought up. Out: one of the exit codes of
``bootstrap.handoff``; metrics, checkpoints and a reward curve in the run's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from bootstrap.handoff import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED, Cluster
from rlpost.checkpoint.provenance import Provenance
from rlpost.checkpoint.state import RunState
from rlpost.config.tree import Config
from rlpost.data.fingerprint import data_fingerprint
from rlpost.errors import ConfigError, DataError, Fenced, Preempted, RlpostError
from rlpost.metrics.mirrors import mirrors
from rlpost.metrics.plot import plot_rewards
from rlpost.metrics.samples import SampleWriter
from rlpost.metrics.wandb import Write, run_id
from rlpost.metrics.writer import MetricsWriter
from rlpost.orchestration.checkpoints import Checkpoints
from rlpost.orchestration.debug_modes import make_stages
from rlpost.orchestration.loop import Loop
from rlpost.orchestration.observation import run_metrics
from rlpost.orchestration.preemption import StopRequest
from rlpost.report.write import Reporter, try_to_write_report
from rlpost.rollout.journal import Journal, settings_hash
from slurm.run_folder import RunFolder

logger = logging.getLogger(__name__)

EXIT_FAILED = 1


def drive(config: Config, run: RunFolder, cluster: Cluster) -> int:
    """Run one attempt; returns its exit code. Errors are logged, never raised, unless they are ours to fix."""
    stop = StopRequest(cluster.stop_file)
    try:
        with mirrors(config, run.root, cluster) as also:
            asyncio.run(_attempt(config, run, cluster, stop, also))
    except Preempted as request:
        seconds, saved = _rounded(stop.seconds_from_signal()), stop.left_with or "nothing"
        try:
            run.ledger.append(
                "preempted", reason=str(request), step=stop.at_step, saved=saved, seconds_from_signal=seconds
            )
        except OSError as error:  # a stop stays a stop
            logger.error("the ledger does not tell of this stop: %s", error)
        logger.info("everything is safe %s s after the signal; saved: %s", seconds, saved)
        return EXIT_PREEMPTED
    except (ConfigError, DataError, Fenced) as error:  # fenced: to come back would be to drive the other attempt out
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
        size = 0 if checkpoints.last is None else checkpoints.last.num_bytes
        run.ledger.append(
            "committed", step=step, checkpoint=path.name, bytes=size, seconds=_rounded(stop.saves.committed(size))
        )
        journal.compact(checkpoints.oldest_kept() or 0)
        reporter.ask()

    reporter = Reporter(run)
    attempt, provenance = Path(cluster.attempt_dir).name, _provenance(config, run)
    checkpoints = Checkpoints(config.checkpoint, run.checkpoints, committed=committed, provenance=provenance)
    checkpoints.claim(f"{attempt} of {run.root}")
    checkpoint, state = checkpoints.newest()
    journal = _journal(config, checkpoints.save_folder, checkpoint, state)
    logger.info("starting from %s", checkpoint or config.checkpoint.ref_load or config.checkpoint.hf_checkpoint)
    run.ledger.append("started", attempt=attempt, step=state.step, nodes=[node.host for node in cluster.nodes])
    stop.saves.expect(num_bytes(Path(config.checkpoint.hf_checkpoint)), num_nodes=len(cluster.nodes))
    stop.saves.recall(entry for entry in run.ledger.read() if entry["event"] == "committed")
    stages = make_stages(config, cluster, checkpoints=checkpoints, stop=stop)
    samples = SampleWriter(run.report, num_steps=config.rollout.num_rollout, decode=stages.text)
    samples.rewind(state.step)
    metrics = MetricsWriter(run.metrics, always=run_metrics(run.ledger.read()), also=also, show=samples.write)
    metrics.rewind(state.step if state.pending is None else state.step - 1)
    loop = None
    try:
        await stages.start(checkpoint)
        run.ledger.append("ready", attempt=attempt, step=state.step)
        rollouts = stages.rollouts(state, journal)
        loop = Loop(stages, config, rollouts=rollouts, journal=journal, metrics=metrics, stop=stop)
        state = await loop.run(state, saved=checkpoint is not None)
        weights = await stages.weights_hash()
    except Preempted:
        stop.at_step = state.step if loop is None else loop.state.step
        raise
    finally:
        await stages.close()
        journal.close()
    picture = run.report / "reward.png"
    plot_rewards(run.metrics, picture)
    run.ledger.append("done", step=state.step, weights=weights)
    logger.info("done: step %d, weights %s, %s", state.step, weights[:16], picture)


def num_bytes(folder: Path) -> int:
    """Of all files in it and below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _provenance(config: Config, run: RunFolder) -> Provenance:
    """What goes into every commit beside the state."""
    model = json.loads((Path(config.checkpoint.hf_checkpoint) / "config.json").read_text())
    return Provenance.of(config, model, wandb_run_id=run_id(run.root) if config.wandb.is_on else None)


def _journal(config: Config, save_folder: Path, checkpoint: Path | None, state: RunState) -> Journal:
    """The journal beside the checkpoints; none where nothing is saved. To a checkpoint of --load it has no entries."""
    if config.debug.debug_rollout_only:
        return Journal.off()
    is_own = checkpoint is None or checkpoint.parent == save_folder
    base = state.journal if is_own else 0
    settings, data = settings_hash(config), data_fingerprint(config.rollout.prompt_data)
    return Journal.resume(save_folder / "journal", base, step=state.step, settings=settings, data=data)
