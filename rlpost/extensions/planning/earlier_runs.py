"""Step times that an earlier run of the same recipe measured.

Input: settings and the runs folder. Output: ``StepTimes`` of the newest run that has enough steps
on as many GPUs with as many samples. Unreadable runs are skipped: an estimate never fails a
command.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from common.run_folder import RunFolder
from rlpost.config.load import read_dump
from rlpost.config.tree import Config
from rlpost.extensions.planning.save_interval import StepTimes
from rlpost.observe.writer import read_metrics

MIN_STEPS = 5
NEWEST_STEPS = 50
MAX_RUNS = 10
"""Number of newest runs to try: a runs folder may hold thousands."""


def earlier_step_times(config: Config) -> StepTimes | None:
    """Medians over the newest steps of the newest comparable run; None without one."""
    found = Path(config.cluster.runs_dir).glob(f"{config.cluster.job_name}*/metrics.jsonl")
    newest_first = sorted(found, key=_changed_at, reverse=True)
    for path in newest_first[:MAX_RUNS]:
        try:
            times = _step_times(RunFolder(path.parent), config)
        except (OSError, ValueError):
            continue
        if times is not None:
            return times
    return None


def _changed_at(path: Path) -> float:
    """Unix time of the last change; 0 for a run that has been removed since it was listed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _step_times(run: RunFolder, config: Config) -> StepTimes | None:
    earlier, gone = read_dump(run.run_json.read_text())
    if gone or _size(earlier) != _size(config):
        return None
    lines = read_metrics(run.metrics)
    timed = [line for line in lines if "time/step_s" in line and "time/train_s" in line]
    if len(timed) < MIN_STEPS:
        return None
    saves = [line["checkpoint/blocking_s"] for line in lines if "checkpoint/blocking_s" in line]
    newest = timed[-NEWEST_STEPS:]
    return StepTimes(
        step_s=median(line["time/step_s"] for line in newest),
        train_s=median(line["time/train_s"] for line in newest),
        source=f"measured in {run.root.name}",
        save_s=median(saves) if saves else None,
    )


def _size(config: Config) -> tuple[object, ...]:
    """Settings that determine the times of a step, besides the lengths of its answers."""
    checkpoint = config.checkpoint
    return (
        config.actor_world_size,
        config.rollout_num_gpus,
        config.samples_per_rollout,
        Path(checkpoint.hf_checkpoint).name,
        checkpoint.async_save,
    )
