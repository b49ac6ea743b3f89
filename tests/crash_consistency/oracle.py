"""Checks of what a run must have at its end after any disturbance.

Input: a world whose last attempt should have finished the run. Output: problems; a correct run has
none.

The trainer's weights are a hash chain, and each token identifies the weights that generated it. So
the batches behind the final weights can be checked one by one: each prompt is from the data and is
trained once; each token is the one that the weights of its version in this chain generate; no
version is older than allowed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rlpost.durable.commit import newest_committed, step_of
from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError
from rlpost.tasks.cursor import epoch_order
from tests.crash_consistency import fakes
from tests.crash_consistency.bell import RING
from tests.crash_consistency.interception import Op
from tests.crash_consistency.world import BATCH_SIZE, NUM_SAMPLES, NUM_STEPS, Ending, Setup, World

SEED = 42  # --rollout-seed
UNKNOWN = 255  # a route that the engine did not report; the trainer routes the token itself
# names that a disturbance may change
CLOCKS = (
    "time/",
    "perf/",
    "memory/",
    "sync/",
    "checkpoint/",
    "driver/",
    "engines/",
    "run/",
)

WEIGHTS, PROMPTS, STALE = "wrong weights", "prompts lost or double", "staleness"
RETRAINED, AGAIN = "another batch at a step", "generated again"
METRICS, SAMPLES, COUNTS, LEDGER = "metrics lines", "samples lines", "counts", "ledger"
NEVER, TRACEBACK, HUNG = "never returns", "traceback", "event loop blocked"
DESTROYED, SILENT, FENCED = (
    "checkpoint destroyed",
    "change accepted silently",
    "refused without need",
)
SIMULATOR = "the simulator itself"


@dataclass(frozen=True)
class Problem:
    """A violated requirement, with the observation."""

    category: str
    detail: str

    def __str__(self) -> str:
        return f"{self.category}: {self.detail}"


@dataclass(frozen=True)
class Baseline:
    """An undisturbed run of a configuration."""

    weights: str
    lines: tuple[Mapping[str, Any], ...]
    ops: tuple[Op, ...]

    @cached_property
    def num_changes(self) -> int:
        """Number of changing operations, that is, of distinct states that a kill can leave."""
        return sum(op.changes for op in self.ops)


@cache
def baseline(base: Path, setup: Setup) -> Baseline:
    """Run a configuration once without disturbance, and check it."""
    world = World(base, setup)
    ending = world.attempt()
    assert ending.how == "done", (setup.name, ending)
    assert not world.disk.model.differences()
    problems = check(world, was_killed=False)
    assert not problems, (setup.name, problems)
    lines = tuple(map(comparable, metrics_lines(world.run.metrics)))
    return Baseline(ending.attempt.observed.weights, lines, tuple(ending.attempt.ops))


def check(
    world: World,
    *,
    reference: Baseline | None = None,
    was_killed: bool = True,
    num_steps: int = NUM_STEPS,
    lost_lines: Iterable[int] = (),
    lost_samples: Iterable[int] = (),
    same_data: bool = True,
    lossy: bool = False,
    committed_since: int = 0,
    keeps_durable: bool = False,
) -> list[Problem]:
    """Return the problems of a run that should be finished.

    ``was_killed``: earlier attempts ended without damage to files or storage, so nothing durable
    may be made twice. ``lost_lines`` and ``lost_samples`` are steps whose lines the scenario has
    damaged. ``lossy``: storage did not recover, so lines of files other than checkpoints and
    journal may be missing if the log names the file. ``committed_since``: see ``destroyed``.
    ``keeps_durable``: no file was damaged, so batches that were trained while the journal called
    them durable, or that the ledger says are saved, are not made twice.
    """
    last = world.endings[-1]
    problems = [problem for ending in world.endings for problem in of_ending(ending)]
    if last.how != "done":
        if last.how not in ("traceback", "hung"):
            problems.append(Problem(NEVER, f"{last.how}: {' | '.join(last.messages[-2:])[:400]}"))
        else:
            problems.append(Problem(NEVER, last.what))
        return problems + destroyed(world, committed_since)
    history = last.attempt.observed.history
    if same_data:
        problems += of_history(world, history, num_steps)
    if (
        reference is not None
        and world.setup.is_exact
        and last.attempt.observed.weights != reference.weights
    ):
        problems.append(Problem(WEIGHTS, "they are not those of an undisturbed run"))
    if was_killed:
        problems += _work_twice(world, history)
    elif keeps_durable:
        problems += _work_twice(world, history, only_durable=True)
    of_lines = _of_metrics(world, history, reference, num_steps, set(lost_lines), is_lossy=lossy)
    problems += of_lines + _of_samples(world, num_steps, set(lost_samples), is_lossy=lossy)
    problems += _of_ledger(world, is_lossy=lossy)
    problems += destroyed(world, committed_since)
    if same_data:
        has_lines = (
            not lost_lines and not lossy and not any(each.category == METRICS for each in of_lines)
        )
        problems += _of_state(world, has_lines=has_lines)
    return problems


def of_ending(ending: Ending) -> list[Problem]:
    """Return the problems of how one attempt ended."""
    if ending.how == "traceback":
        return [Problem(TRACEBACK, ending.what)]
    if ending.how == "hung":
        return [Problem(HUNG, ending.what)]
    return []


def of_history(world: World, history: Sequence[Any], num_steps: int) -> list[Problem]:
    """Check the batches behind the final weights one by one."""
    problems = []
    chain, seen = [fakes.INITIAL], Counter[int]()
    if len(history) != num_steps:
        problems.append(Problem(WEIGHTS, f"trained {len(history)} batches instead of {num_steps}"))
    for step, batch in enumerate(history):
        if len(batch) != BATCH_SIZE:
            problems.append(Problem(PROMPTS, f"step {step + 1} has {len(batch)} groups"))
        for group in batch:
            seen[group["prompt_id"]] += 1
            problems += _of_group(world, group, step, chain)
        chain.append(fakes.next_weights(chain[-1], batch))
    double = sorted(prompt_id for prompt_id, count in seen.items() if count > 1)
    if double:
        problems.append(Problem(PROMPTS, f"{double} are trained more than once"))
    return problems


def _of_group(
    world: World, group: Mapping[str, Any], step: int, chain: Sequence[str]
) -> list[Problem]:
    problems, prompt_id = [], group["prompt_id"]
    expected = row_of(world, prompt_id)
    rollout = world.config.rollout
    if len(group["samples"]) != NUM_SAMPLES:
        problems.append(Problem(PROMPTS, f"prompt {prompt_id} has {len(group['samples'])} samples"))
    for sample in group["samples"]:
        if (bytes(sample["prompt"]).decode(), sample["label"]) != (
            expected["input"],
            expected["label"],
        ):
            problems.append(Problem(PROMPTS, f"prompt {prompt_id} is not that of the data"))
        newest = max(sample["versions"])
        if newest > step:
            problems.append(
                Problem(STALE, f"prompt {prompt_id} of step {step + 1}: staleness {step - newest}")
            )
            continue
        oldest = step - min(sample["versions"])
        behind = rollout.update_weights_interval - 1
        allowed = {"sync": behind, "one_step_off": 1 + behind}.get(
            rollout.rollout_mode, rollout.max_staleness or 1
        )
        if any(version % rollout.update_weights_interval for version in sample["versions"]):
            problems.append(
                Problem(
                    WEIGHTS, f"prompt {prompt_id} of step {step + 1} was written between updates"
                )
            )
        # kept groups wait for later steps and may be older
        is_kept = rollout.partial_rollout or rollout.over_sampling_batch_size
        if oldest > allowed and not (is_kept and rollout.rollout_mode != "fully_async"):
            problems.append(
                Problem(STALE, f"prompt {prompt_id} of step {step + 1}: staleness {oldest}")
            )
        for position, (token, version) in enumerate(
            zip(sample["answer"][:-1], sample["versions"], strict=False)
        ):
            if token != _expected(world, chain[version], sample, prompt_id, position):
                problems.append(
                    Problem(
                        WEIGHTS,
                        f"prompt {prompt_id} of step {step + 1} was written by other weights",
                    )
                )
                break
        if world.config.env.env and not _is_masked_at_the_bell(sample, prompt_id):
            problems.append(Problem(WEIGHTS, f"prompt {prompt_id} has another mask than its own"))
        if world.config.grpo.use_rollout_routing_replay and not _has_its_routes(
            sample, prompt_id, chain, has_bell=bool(world.config.env.env)
        ):
            problems.append(
                Problem(
                    WEIGHTS, f"prompt {prompt_id} of step {step + 1} has other routes than its own"
                )
            )
    return problems


def _expected(
    world: World, weights: str, sample: Mapping[str, Any], prompt_id: int, position: int
) -> int:
    """The token at a position of an answer other than the last, if these weights generated it."""
    index = sample["index"]
    first = fakes.answer_length(prompt_id, index)
    if world.config.env.env and position in (first - 1, first):
        return fakes.EOS if position < first else ord(RING)
    return fakes.token(weights, prompt_id, index, position)


def _is_masked_at_the_bell(sample: Mapping[str, Any], prompt_id: int) -> bool:
    """Whether exactly the token of the environment is left out of the loss."""
    first = fakes.answer_length(prompt_id, sample["index"])
    has_all = len(sample["mask"]) == first + fakes.SECOND_TURN
    return has_all and [at for at, one in enumerate(sample["mask"]) if not one] == [first]


def _has_its_routes(
    sample: Mapping[str, Any], prompt_id: int, chain: Sequence[str], *, has_bell: bool
) -> bool:
    """Whether each token was routed by the weights that generated the next one.

    Routes may be unknown only where several versions generated an answer, and of the bell. The token
    before the bell is read with the bell, by the weights of the second turn.
    """
    bell = len(sample["prompt"]) + fakes.answer_length(prompt_id, sample["index"])
    versions, length = sample["versions"], len(sample["prompt"])
    if sample["routes"] is None or len(sample["routes"]) != length + len(sample["answer"]) - 1:
        return False
    for position, found in enumerate(sample["routes"]):
        read_with = position + 2 if has_bell and position == bell - 1 else position + 1
        weights = chain[versions[max(0, read_with - length)]]
        may_be_unknown = len(set(versions)) > 1 or (has_bell and position == bell)
        is_unknown = may_be_unknown and found == [[UNKNOWN] * 2] * 2
        if not is_unknown and found != fakes.experts(weights, prompt_id, sample["index"], position):
            return False
    return True


def row_of(world: World, prompt_id: int) -> Mapping[str, str]:
    """Return the data row of a prompt id."""
    size = len(world.rows)
    epoch, offset = divmod(prompt_id, size)
    found: dict[str, str] = json.loads(world.rows[_order(size, epoch)[offset]])
    return found


@cache
def _order(size: int, epoch: int) -> Sequence[int]:
    return epoch_order(size, epoch, shuffle=True, seed=SEED)


def _work_twice(
    world: World, history: Sequence[Any], *, only_durable: bool = False
) -> list[Problem]:
    """Check that no trained batch is generated again or replaced.

    A batch is durable before it is trained, so a resumed run trains it unchanged. After storage
    failures, ``only_durable``, some batches were trained without it.
    """
    problems, done, saved = [], set[int](), _saved(world)
    final = [fakes.digest(json.dumps(batch, sort_keys=True)) for batch in history]
    for ending in world.endings:
        again = sorted(done.intersection(ending.attempt.observed.graded))
        if again:
            problems.append(Problem(AGAIN, f"prompts {again}, which an attempt before had trained"))
        observed = ending.attempt.observed
        is_partial = only_durable and ending not in saved
        trained = observed.durable if is_partial else observed.trained
        for step, batch in trained:
            if step < len(final) and batch != final[step]:
                problems.append(
                    Problem(RETRAINED, f"step {step + 1} was trained on another batch before")
                )
        kept = {step for step, _ in trained}
        done |= {
            prompt_id
            for step, batch in enumerate(observed.history)
            if step in kept or not is_partial
            for prompt_id in _ids(batch)
        }
    return problems


def _saved(world: World) -> list[Ending]:
    """Return the preempted attempts of which the ledger says that their state is saved."""
    stops = [ending for ending in world.endings if ending.how == "preempted"]
    lines = [entry for entry in events(world) if entry.get("event") == "preempted"]
    if len(stops) != len(lines):  # a line is lost
        return []
    pairs = zip(stops, lines, strict=True)
    return [ending for ending, line in pairs if line.get("saved") != "nothing"]


def _ids(batch: Sequence[Mapping[str, Any]]) -> list[int]:
    return [group["prompt_id"] for group in batch]


def metrics_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines of the file; those that are not JSON objects with a step become {}."""
    lines = []
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            found = {}
        lines.append(found if isinstance(found, dict) and "step" in found else {})
    return lines


def comparable(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line without the values that depend on clocks or the number of attempts."""
    return {name: value for name, value in line.items() if not name.startswith(CLOCKS)}


def _said(world: World, name: str) -> bool:
    """Whether a log message names a file."""
    return any(name in message for ending in world.endings for message in ending.messages)


def _of_steps(
    world: World,
    name: str,
    steps: Sequence[Any],
    wanted: Sequence[int],
    lost: set[int],
    *,
    is_lossy: bool,
) -> bool:
    """Whether a file has all wanted lines, each once and in order."""
    kept = [step for step in steps if step not in lost and step is not None]
    wanted = [step for step in wanted if step not in lost]
    if is_lossy and _said(world, name):
        wanted = [step for step in wanted if step in kept]
    return kept == wanted and (bool(lost) or list(steps) == wanted)


def _of_metrics(
    world: World,
    history: Sequence[Any],
    reference: Baseline | None,
    num_steps: int,
    lost: set[int],
    *,
    is_lossy: bool,
) -> list[Problem]:
    lines = metrics_lines(world.run.metrics)
    steps = [line.get("step") for line in lines]
    if not _of_steps(world, "metrics.jsonl", steps, range(num_steps + 1), lost, is_lossy=is_lossy):
        return [Problem(METRICS, f"steps {steps}")]
    problems = []
    chain = [fakes.INITIAL]
    for batch in history:
        chain.append(fakes.next_weights(chain[-1], batch))
    for line in lines:
        step = line.get("step")
        if step in lost or step is None:
            continue
        if step and line.get("train/weights") != float(int(chain[step][:8], 16)):
            problems.append(Problem(METRICS, f"line {step} is of other weights"))
        elif (
            reference is not None
            and world.setup.is_exact
            and comparable(line) != reference.lines[step]
        ):
            other = reference.lines[step]
            names = sorted(
                name for name in {*line, *other} if comparable(line).get(name) != other.get(name)
            )
            category = COUNTS if all(name.startswith("rollout/") for name in names) else METRICS
            problems.append(Problem(category, f"line {step} differs: {names[:4]}"))
    return problems


def _of_samples(world: World, num_steps: int, lost: set[int], *, is_lossy: bool) -> list[Problem]:
    steps = [line.get("step") for line in metrics_lines(world.run.report / "samples.jsonl")]
    if _of_steps(world, "samples.jsonl", steps, range(1, num_steps + 1), lost, is_lossy=is_lossy):
        return []
    return [Problem(SAMPLES, f"steps {steps}")]


def events(world: World) -> list[dict[str, Any]]:
    """Return the readable lines of the ledger."""
    path = world.run.ledger.path
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            found.append(entry)
    return found


def _of_ledger(world: World, *, is_lossy: bool) -> list[Problem]:
    done = [entry for entry in events(world) if entry.get("event") == "done"]
    weights = world.endings[-1].attempt.observed.weights
    if is_lossy and _said(world, "ledger"):
        return []
    if not done or done[-1].get("weights") != weights:
        return [Problem(LEDGER, f"{len(done)} lines say that the run is done")]
    return []


def num_committed(world: World) -> int:
    """Number of commits in the ledger."""
    return sum(entry.get("event") == "committed" for entry in events(world))


def destroyed(world: World, since: int = 0) -> list[Problem]:
    """Check that the last checkpoint committed in the ledger, or a newer one, can be read.

    The first ``since`` commits do not count, because the scenario has damaged them.
    """
    committed = [entry for entry in events(world) if entry.get("event") == "committed"][since:]
    if not committed or not isinstance(committed[-1].get("step"), int):
        return []
    try:
        found = newest_committed(world.run.checkpoints)
    except CheckpointError as error:
        return [Problem(DESTROYED, str(error))]
    step = committed[-1]["step"]
    if found.path is None or step_of(found.path) < step:
        why = "; ".join(f"{path.name}: {reason}" for path, reason in found.skipped)
        return [
            Problem(
                DESTROYED, f"step {step} was committed and cannot be read ({why or 'it is gone'})"
            )
        ]
    return []


def _of_state(world: World, *, has_lines: bool) -> list[Problem]:
    """Check the counts of the newest checkpoint and of all lines against the data."""
    path = newest_committed(world.run.checkpoints).path
    if path is None:
        return [Problem(DESTROYED, "a finished run has no checkpoint")]
    state = RunState.from_json((path / "run_state.json").read_text())
    backlog, problems = state.backlog, []
    good = [number for number in range(backlog.newest_id + 1) if row_of(world, number)["input"]]
    if backlog.num_fetched != len(good):
        problems.append(Problem(PROMPTS, f"{backlog.num_fetched} were fetched of {len(good)}"))
    lines = metrics_lines(world.run.metrics)
    if not has_lines:
        return problems
    for name, wanted in (
        ("rollout/bad_prompts", backlog.newest_id + 1 - len(good)),
        ("rollout/num_filtered", backlog.num_filtered),
    ):
        counted = sum(line.get(name, 0) for line in lines) + backlog.counts.get(name, 0)
        if counted != wanted:
            problems.append(Problem(COUNTS, f"{name} adds up to {counted:.0f} instead of {wanted}"))
    return problems
