"""The driver: runs one attempt on a running cluster, and returns its exit code.

Input: the settings, the run's folder and the cluster that the agents started. Output: one of the
exit codes of ``common.exit_codes``; metrics, checkpoints and a reward curve in the run's folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import TypeVar

from common.attempt import CAUSE_FILE
from common.cluster import Cluster
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from common.files import write_atomic
from common.run_folder import RunFolder
from common.run_identity import copy_words, original_of, settle_identity
from rlpost.config import extensions
from rlpost.config.tree import Config
from rlpost.driver.checkpoints import Checkpoints, folder_bytes
from rlpost.driver.debug_modes import choose_mode
from rlpost.driver.ledger_lines import LedgerLines, RecordEvent, StartLines
from rlpost.driver.loop import Loop
from rlpost.driver.loop_lag import LoopLag
from rlpost.driver.observation import num_engine_restarts, run_metrics, steps_again
from rlpost.driver.preemption import StopRequest
from rlpost.driver.run_inputs import input_digests
from rlpost.driver.run_stages import RunStages
from rlpost.durable.daemon_threads import in_daemon, start_in_daemon, within
from rlpost.durable.journal import Journal
from rlpost.durable.ownership import check_attempt, check_newest
from rlpost.durable.provenance import Provenance
from rlpost.durable.result_settings import result_settings
from rlpost.durable.run_files import LAST_S, storage_words
from rlpost.durable.state import RunState
from rlpost.durable.weights_fingerprint import fingerprint
from rlpost.errors import (
    ConfigError,
    DataError,
    Fenced,
    Hang,
    Preempted,
    RlpostError,
)
from rlpost.models.config_file import read_config
from rlpost.observe.mirrors import Write, mirrors
from rlpost.observe.reporter import Reporter, try_to_write_report
from rlpost.observe.samples import SampleWriter
from rlpost.observe.writer import MetricsWriter, read_metrics
from rlpost.tasks.fingerprint import data_fingerprint
from rlpost.tasks.prompt_settings import prompt_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

LAST_REPORT_S = 60.0
AMEND_AGAIN_S = 0.2
HANGS = (
    "{} took more than {:.0f} s (--save-deadline-s): the storage hangs; repair the storage or the "
    "mount. A requeue resumes from the same checkpoint"
)


def drive(config: Config, run: RunFolder, cluster: Cluster) -> int:
    """Run one attempt and return its exit code.

    Expected errors are logged; only bugs of rlpost are raised.
    """
    extensions.register_adapters()
    stop = StopRequest(cluster.stop_file)
    try:
        code = _run_attempt(config, run, cluster, stop)
    except Fenced as error:  # a retry would fence the newer attempt, which owns the report now
        logger.error("%s", error)
        return EXIT_CONFIG
    except BaseException:
        _last_report(run)
        raise
    _last_report(run)
    return code


def _run_attempt(config: Config, run: RunFolder, cluster: Cluster, stop: StopRequest) -> int:
    """Run the attempt and return its exit code.

    Raises Fenced, and errors that are bugs of rlpost.
    """
    try:
        if (original := original_of(run.root)) is not None:
            logger.warning(copy_words(run.root, original))
        settle_identity(run.root)  # before anything has its name
        with mirrors(config, run.root, cluster) as also:
            asyncio.run(_attempt(config, run, cluster, stop, also))
    except Preempted as request:
        return _record_preemption(request, config, run, cluster, stop)
    except Fenced:
        raise
    except (ConfigError, DataError) as error:
        logger.error("%s", error)
        return EXIT_CONFIG
    except RlpostError as error:
        logger.error("%s", error)
        return EXIT_FAILED
    except OSError as error:
        words = storage_words(error)
        if words is None:
            raise
        logger.error("%s. Committed checkpoints and the journal are intact", words)
        return EXIT_FAILED
    return EXIT_DONE


def _last_report(run: RunFolder) -> None:
    """Write the report within LAST_REPORT_S: the job may be killed soon, and storage may hang."""
    writing = start_in_daemon(lambda: try_to_write_report(run))
    wait_for([writing], LAST_REPORT_S)
    if not writing.done():
        logger.warning("the report was not written to %s within %.0f s", run.report, LAST_REPORT_S)


def _record_preemption(
    request: Preempted, config: Config, run: RunFolder, cluster: Cluster, stop: StopRequest
) -> int:
    """Record a preemption in the ledger; return EXIT_PREEMPTED even if that fails.

    Raises Fenced when a newer attempt owns the run.
    """
    seconds, saved = _rounded(stop.seconds_from_signal()), stop.left_with or "nothing"
    folder = Path(config.checkpoint.save) if config.checkpoint.save else run.checkpoints
    check = partial(check_attempt, folder, cluster.driver_name, str(run.root))
    lines = LedgerLines(run.ledger, check=check)
    details = {"step": stop.at_step, "saved": saved, "seconds_from_signal": seconds}
    lines.finish("preempted", reason=str(request), **details)
    logger.info("preempted: state is durable %s s after the signal; saved: %s", seconds, saved)
    return EXIT_PREEMPTED


async def _attempt(
    config: Config, run: RunFolder, cluster: Cluster, stop: StopRequest, also: Write | None
) -> None:
    async with LoopLag() as loop_lag:
        await _train(config, run, cluster, stop, also, loop_lag)


def _count_engine_restarts(
    ledger: LedgerLines, entries: Sequence[Mapping[str, object]]
) -> tuple[dict[str, float], RecordEvent]:
    """Return metrics of every line, and a ``ledger.soon`` that counts engine restarts in them."""
    always = run_metrics(entries)

    def record(event: str, **details: object) -> None:
        always["run/num_engine_restarts"] += num_engine_restarts({"event": event, **details})
        ledger.soon(event, **details)

    return always, record


async def _train(
    config: Config,
    run: RunFolder,
    cluster: Cluster,
    stop: StopRequest,
    also: Write | None,
    loop_lag: LoopLag,
) -> None:
    def record_commit(step: int, path: Path) -> None:
        last = checkpoints.last
        size = 0 if last is None else last.num_bytes
        times = {
            "seconds": _rounded(stop.saves.record_commit(size)),
            "blocking_s": None if last is None else _rounded(last.blocking_s),
        }
        ledger.soon("committed", step=step, checkpoint=path.name, bytes=size, **times)
        journal.note_committed(0 if last is None else last.journal)
        journal.compact(checkpoints.oldest_kept() or 0)
        reporter.ask()

    reporter = Reporter(run)
    contents = await _contents(config, stop)
    provenance = _provenance(config, run, contents)
    checkpoints = Checkpoints(
        config.checkpoint, run.checkpoints, committed=record_commit, provenance=provenance
    )
    checkpoint, state = await _claim(config, run, cluster, checkpoints, stop)
    opening = _journal(config, checkpoints, checkpoint, state, contents)
    journal = await stop.unless_requested(opening)
    logger.info(
        "starting from %s",
        checkpoint or config.checkpoint.ref_load or config.checkpoint.hf_checkpoint,
    )
    ledger = LedgerLines(run.ledger, check=checkpoints.check_owner)
    again = await _off_loop(stop, lambda: _steps_again(run.metrics, state.step))
    start = StartLines(ledger, cluster, await _off_loop(stop, ledger.entries))
    changed = dict.fromkeys((*checkpoints.changed, *journal.changes))
    entries = await start.record_start(config, state.step, again, list(changed))
    model = Path(config.checkpoint.hf_checkpoint)
    weight_bytes = await _off_loop(stop, lambda: folder_bytes(model))
    stop.saves.expect(weight_bytes, num_nodes=len(cluster.nodes))
    stop.saves.recall(entry for entry in entries if entry["event"] == "committed")
    always, record = _count_engine_restarts(ledger, entries)
    stages = choose_mode(config)(config, cluster, checkpoints=checkpoints, stop=stop, record=record)
    samples, metrics = _writers(config, run, stages, always, also, checkpoints.check_owner)
    await samples.begin(state.step)
    await metrics.begin(state.step if state.pending is None else state.step - 1)
    loop = None
    try:
        await _off_loop(stop, stages.generation.read_prompts)
        await stages.start(checkpoint)
        await start.record_ready(state.step, again)
        rollouts = stages.rollouts(state, journal)
        await stages.resume_evaluations(state.step, partial(_evaluated, journal, metrics))
        await start.record_kept(journal.kept())
        loop = Loop(
            stages,
            config,
            checkpoints=checkpoints,
            rollouts=rollouts,
            journal=journal,
            metrics=metrics,
            stop=stop,
            versions=stages.versions,
            loop_lag=loop_lag.take,
        )
        state = await loop.run(state, saved=checkpoint is not None)
        weights = await stages.weights_hash()
    except Preempted:
        stop.at_step = state.step if loop is None else loop.state.step
        raise
    except Hang as hang:
        await _hangs(hang, cluster, ledger)
        raise
    finally:
        await stages.close()
        await _close(journal, samples, metrics, ledger)
    await ledger.append("done", step=state.step, weights=weights)
    ledger.close()
    logger.info("done: step %d%s", state.step, f", weights {weights[:16]}" if weights else "")


async def _claim(
    config: Config, run: RunFolder, cluster: Cluster, checkpoints: Checkpoints, stop: StopRequest
) -> tuple[Path | None, RunState]:
    """Take over the checkpoint folder; return the checkpoint to start from, and its state."""
    storage_s, name = config.checkpoint.save_deadline_s, f"{cluster.driver_name} of {run.root}"
    check = partial(check_newest, run.attempts, Path(cluster.attempt_dir).name)
    async with within(storage_s, HANGS.format("the claim of the checkpoint folder", storage_s)):
        await _off_loop(stop, lambda: checkpoints.claim(name, check))
    async with within(storage_s, HANGS.format("reading the newest checkpoint's state", storage_s)):
        return await _off_loop(stop, checkpoints.newest)


async def _contents(config: Config, stop: StopRequest) -> dict[str, str | None]:
    """Return fingerprints of the weights that a run may start from, by flag."""
    given = config.checkpoint
    folders = {"--hf-checkpoint": given.hf_checkpoint, "--ref-load": given.ref_load}

    def read() -> dict[str, str | None]:
        return {flag: fingerprint(Path(path)) for flag, path in folders.items() if path}

    async with within(
        given.save_deadline_s, HANGS.format("reading the initial weights", given.save_deadline_s)
    ):
        return await _off_loop(stop, read)


async def _evaluated(
    journal: Journal, metrics: MetricsWriter, step: int, found: Mapping[str, float]
) -> None:
    """Record the evaluation of an earlier step; return when its metrics line has it."""
    journal.append_evaluation(step, found)
    while not await metrics.amend(step, found):
        await asyncio.sleep(AMEND_AGAIN_S)


async def _hangs(hang: Hang, cluster: Cluster, ledger: LedgerLines) -> None:
    """Record a hang in the ledger, and for the agent's verdict."""
    await ledger.append("hang", attempt=Path(cluster.attempt_dir).name, **hang.details)
    cause = Path(cluster.attempt_dir) / CAUSE_FILE
    try:
        async with asyncio.timeout(LAST_S):
            await in_daemon(lambda: write_atomic(cause, f"{hang}\n"))
    except OSError as error:  # TimeoutError is one
        logger.warning("%s was not written: %s", cause, error or "the storage hangs")


def _steps_again(metrics: Path, step: int) -> dict[str, float] | None:
    """Return the steps of earlier attempts after ``step``; None if they cannot be read."""
    try:
        return steps_again(read_metrics(metrics), step=step)
    except OSError as error:
        logger.warning(
            "%s: %s; the ledger does not record the steps that are trained again", metrics, error
        )
        return None


async def _off_loop(stop: StopRequest, act: Callable[[], T]) -> T:
    """Run ``act`` in a thread, so that a stop request does not wait for slow storage."""
    return await stop.unless_requested(in_daemon(act))


def _writers(
    config: Config,
    run: RunFolder,
    stages: RunStages,
    always: Mapping[str, float],
    also: Write | None,
    owned: Callable[[], None],
) -> tuple[SampleWriter, MetricsWriter]:
    """Return the writers of sample answers and of metrics; each line goes to ``also`` as well."""

    def mirror(step: int, metrics: Mapping[str, float]) -> None:
        if also is not None:
            also(step, metrics)
        samples.write_evaluated(step, stages.generation.take_answered(step))

    num_steps = config.rollout.num_rollout
    samples = SampleWriter(
        run.report, num_steps=num_steps, decode=stages.generation.tokenizer.decode, check=owned
    )
    show = samples.write
    return samples, MetricsWriter(run.metrics, always=always, also=mirror, show=show, check=owned)


async def _close(*files: Journal | SampleWriter | MetricsWriter | LedgerLines) -> None:
    """Close the files of the run, retrying failed writes, within a deadline: storage may hang."""

    def close() -> None:
        for file in files:
            file.close()

    try:
        async with asyncio.timeout(2 * LAST_S):
            await in_daemon(close)
    except TimeoutError:
        logger.error(
            "the files of the run were not closed within %.0f s: the storage hangs", 2 * LAST_S
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _provenance(config: Config, run: RunFolder, weights: Mapping[str, str | None]) -> Provenance:
    """Return the provenance that every checkpoint records."""
    model = read_config(config.checkpoint.hf_checkpoint)
    label = settle_identity(run.root).label if config.wandb.is_on else None
    inputs = input_digests(config)
    return Provenance.of(config, model, weights=weights, inputs=inputs, wandb_run_id=label)


async def _journal(
    config: Config,
    checkpoints: Checkpoints,
    checkpoint: Path | None,
    state: RunState,
    contents: Mapping[str, str | None],
) -> Journal:
    """Open the journal beside the checkpoints; --debug-rollout-only has none."""
    if config.debug.debug_rollout_only:
        return Journal.off()
    folder = checkpoints.save_folder / "journal"
    if checkpoints.origin is not None:
        contents = {**contents, "--load": checkpoints.origin.content}
    rollout = config.rollout
    fields = prompt_fields(rollout, has_environment=config.answers_are_episodes)
    resume = partial(
        Journal.resume,
        folder,
        checkpoints.journal_segment(checkpoint, state),
        step=state.step,
        settings=result_settings(config, contents).to_json(),
        data=await in_daemon(lambda: data_fingerprint(rollout.prompt_data, fields)),
        check=checkpoints.check_owner,
    )
    return await Journal.open(folder, resume)
