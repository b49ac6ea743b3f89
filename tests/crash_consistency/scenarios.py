"""Trials: how a run is disturbed, at which operation, in which configuration.

Input: a scenario's name and a seed. Output: trials. Each can be repeated by its name,
``SCENARIO/SETUP/WHAT/NUMBER/SEED``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from rlpost.durable import segment_writer
from rlpost.durable.commit import COMMITTED, PREFIX
from rlpost.durable.journal_chain import read_folder
from tests.crash_consistency import oracle
from tests.crash_consistency.durability import VARIANTS
from tests.crash_consistency.hooks import (
    FaultAt,
    FaultFor,
    JumpAt,
    KillAfter,
    KillAt,
    Lagging,
    Paused,
    StopAt,
)
from tests.crash_consistency.interception import Hook, Op
from tests.crash_consistency.oracle import Baseline, Problem, baseline, check
from tests.crash_consistency.world import (
    BAD_ROWS,
    NUM_ROWS,
    NUM_STEPS,
    SETUPS,
    WITH_ENVIRONMENT,
    Ending,
    World,
    rows,
)

MOST_ATTEMPTS = 4  # undisturbed attempts within which a run must finish
HANGING = ("fsync", "write", "link")
ERRORS = ("ENOSPC", "EIO", "EROFS", "ESTALE", "EDQUOT")
DEADLINES: dict[str, str | int] = {"checkpoint": "N/A", "journal": 1}


@dataclass(frozen=True)
class Trial:
    """One disturbed run.

    ``number`` is the operation at which it is disturbed; ``seed`` decides the rest.
    """

    scenario: str
    setup: str
    what: str
    number: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.scenario}/{self.setup}/{self.what}/{self.number}/{self.seed}"

    @classmethod
    def named(cls, name: str) -> Trial:
        """Parse the name of a trial."""
        scenario, setup, what, number, seed = name.split("/")
        return cls(scenario, setup, what, int(number), int(seed))


@dataclass(frozen=True)
class Result:
    """The result of a trial."""

    trial: Trial
    problems: tuple[Problem, ...]
    endings: tuple[Ending, ...]
    note: str = ""  # description of the disturbance
    remark: str = ""  # a loss that the documentation allows


@dataclass
class Stage:
    """A running trial."""

    world: World
    trial: Trial
    rng: random.Random
    reference: Baseline
    problems: list[Problem] = field(default_factory=list)
    note: str = ""
    remark: str = ""

    def finish(self) -> None:
        """Run undisturbed attempts until the run is done."""
        for _ in range(MOST_ATTEMPTS):
            if self.world.attempt().how == "done":
                return


Play = Callable[[Stage], list[Problem]]


def run_trial(base: Path, trial: Trial) -> Result:
    """Run one trial, inside ``world.ready``."""
    setup = {**SETUPS, **WITH_ENVIRONMENT}[trial.setup]
    world = World(base, setup, trial.seed)
    stage = Stage(world, trial, random.Random(str(trial)), baseline(base, setup))
    world = stage.world = World(base, setup, trial.seed)  # the baseline may have used the folder
    problems = PLAYS[trial.scenario](stage)
    drift = world.disk.model.differences()
    if drift:
        problems.append(Problem(oracle.SIMULATOR, f"its model is not the folder: {drift[:3]}"))
    return Result(
        trial, tuple(dict.fromkeys(problems)), tuple(world.endings), stage.note, stage.remark
    )


def _kill(stage: Stage) -> list[Problem]:
    """Kill an attempt at an operation.

    WHAT: before; torn, halfway through a write; repeated, with further kills at random operations;
    lagging, while records wait in the journal's queue.
    """
    world, trial = stage.world, stage.trial
    lagging = [Lagging(stage.rng.choice((2, 5, 20, 100)))] if trial.what == "lagging" else []
    world.attempt(KillAt(trial.number, torn=trial.what == "torn"), *lagging)
    if trial.what == "repeated":
        for _ in range(stage.rng.randint(1, 4)):
            world.attempt(KillAt(stage.rng.randrange(stage.reference.num_changes)))
    stage.finish()
    return check(world, reference=stage.reference)


def _power(stage: Stage) -> list[Problem]:
    """Cut the power at an operation. WHAT: a variant of durability, and "*N" for N power losses."""
    world, trial = stage.world, stage.trial
    variant, _, times = trial.what.partition("*")
    number = trial.number
    for _ in range(int(times or 1)):
        world.attempt(KillAt(number, torn=variant == "torn"))
        world.disk.model.lose_power(variant, stage.rng)
        number = stage.rng.randrange(stage.reference.num_changes)
    stage.finish()
    return check(world, reference=stage.reference)


def _stop(stage: Stage) -> list[Problem]:
    """Request a stop at an operation; a kill or power loss may follow before the attempt stops."""
    world, trial, rng = stage.world, stage.trial, stage.rng
    saved, _, then = trial.what.partition("+")
    hooks = [StopAt(world, trial.number, DEADLINES[saved])]
    kill = [KillAt(trial.number + rng.randint(1, 60))] if then else []
    world.attempt(*hooks, *kill)
    if then in VARIANTS:
        world.disk.model.lose_power(then, rng)
    stage.finish()
    return check(world, reference=stage.reference)


PATHS: dict[str, Callable[[Op], bool]] = {
    "metrics": lambda op: "metrics.jsonl" in op.path,
    "samples": lambda op: "samples.jsonl" in op.path,
    "ledger": lambda op: "ledger.jsonl" in op.path,
    "latest": lambda op: op.path.endswith("checkpoints/latest") or "/.latest.tmp" in op.path,
    "journal": lambda op: "checkpoints/journal" in op.path,
    "owner": lambda op: "OWNER" in op.path,
    "checkpoint": lambda op: "iter_" in op.path,
}


def _faulty(error: str, where: str) -> Callable[[Op], bool]:
    """Return a predicate for the operations at which storage fails."""
    of_path = PATHS.get(where, lambda op: True)

    def is_faulty(op: Op) -> bool:
        if error == "short":
            kinds = op.kind == "write"
        elif error == "hang":
            # the trainer's shards are written in another process than the event loop's
            is_of_actor = op.kind == "write" and "/shard-" in op.path
            kinds = op.kind in HANGING and not is_of_actor
        elif error == "fsync":
            kinds = op.kind == "fsync"
        elif where in PATHS or error in ("ENOSPC", "EROFS", "EDQUOT"):
            kinds = op.changes and op.kind not in ("unlink", "rmdir")
        else:
            kinds = True  # reads can fail with EIO and ESTALE, too
        return kinds and of_path(op)

    return is_faulty


def _fault(stage: Stage) -> list[Problem]:
    """Make storage fail in the first attempt, or in the second after a kill; then it recovers.

    WHAT: ERROR:once|on|PATH[:resume] for one operation, all operations from there on, or all
    operations on one file from the n-th on.
    """
    world, trial = stage.world, stage.trial
    error, where, *when = trial.what.split(":")
    if when:
        world.attempt(KillAt(stage.rng.randrange(stage.reference.num_changes)))
    name = "EIO" if error == "fsync" else error
    fault = FaultAt(
        trial.number, name, 1 if where == "once" else float("inf"), _faulty(error, where)
    )
    ending = world.attempt(fault)
    if not fault.hit and ending.how == "done":
        stage.note = "not reached"
    elif fault.hit:
        stage.note = f"{fault.hit[0].kind} {fault.hit[0].path} -> {ending.how}"
    problems = []
    if ending.how == "waiting":
        stage.remark = "waits for storage that hangs; a stop ends it"
    if ending.how == "refused":
        problems.append(
            Problem(oracle.FENCED, f"{stage.note}: {' | '.join(ending.messages[-1:])[:300]}")
        )
    if ending.how != "done":
        stage.finish()
    is_lossy = where != "once" or error == "hang"
    return problems + check(world, reference=stage.reference, was_killed=False, lossy=is_lossy)


def _in_journal(*kinds: str) -> Callable[[Op], bool]:
    return lambda op: op.kind in kinds and PATHS["journal"](op)


WRITES, READS = ("create", "write", "fsync", "link", "resize"), ("open", "read", "list", "stat")
DISTURBANCES: dict[str, Callable[[random.Random, int], Hook]] = {
    "full": lambda rng, number: FaultFor(
        number, "ENOSPC", rng.choice((0.05, 0.3, 2.0)), lambda op: op.kind in WRITES[:2]
    ),
    "failing": lambda rng, number: FaultFor(
        number,
        rng.choice(("EIO", "ESTALE")),
        rng.choice((0.02, 0.05, 0.1, 0.3, 2.0)),
        _in_journal(*WRITES),
    ),
    "hanging": lambda rng, number: FaultFor(
        number,
        "hang",
        rng.choice((0.05, 0.15, 0.3, 1.0, 70.0)),
        _in_journal("write", "fsync", "link"),
    ),
    "paused": lambda rng, number: JumpAt(number, rng.choice((1.0, 100.0, 5000.0))),
}
"""What happens to an attempt from its ``number``-th changing operation on."""


def _sequence(stage: Stage) -> list[Problem]:
    """Disturb an attempt for a time, more than once; then end it, and let reads fail at the resume.

    WHAT: the first disturbance, then how the attempt ends: kill|stop|power. Deadlines of storage are
    as short as an answer, as those of a run are shorter than its answers.
    """
    world, trial, rng = stage.world, stage.trial, stage.rng
    first, end = trial.what.split("+")
    names = [first, *rng.choices(list(DISTURBANCES), k=rng.choice((0, 0, 1, 2)))]
    span = stage.reference.num_changes
    faults = [DISTURBANCES[name](rng, (trial.number + rng.randrange(40)) % span) for name in names]
    hooks = [*faults, *([Lagging(rng.choice((2, 5, 20)))] if rng.random() < 0.3 else ())]
    if end == "stop":
        hooks.append(StopAt(world, trial.number + rng.randrange(60), rng.choice(("N/A", 1))))
    else:
        hooks.append(KillAfter(rng.randrange(span // 2), faults))
    with mock.patch.object(segment_writer, "DEADLINE_S", rng.choice((0.1, 0.1, 60.0))):
        ending = world.attempt(*hooks)
    if end == "power":
        world.disk.model.lose_power(rng.choice(VARIANTS), rng)
    is_read = _in_journal(*READS)
    seconds = rng.choice((0.05, 0.3, 1.0, 5.0))
    reads = FaultFor(rng.randrange(40), rng.choice(("EIO", "ESTALE")), seconds, is_read, is_read)
    slow = [KillAt(rng.randrange(span))] if rng.random() < 0.3 else []
    resumed = world.attempt(reads, *slow)
    stage.note = f"{', '.join(names)}; {ending.how}; then {resumed.how}"
    if resumed.how != "done":
        stage.finish()
    # an episode of an environment times out while its process is paused
    is_exact = not (world.config.env.env and "paused" in names)
    reference = stage.reference if is_exact else None
    return check(world, reference=reference, was_killed=False, lossy=True, keeps_durable=True)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "flip": lambda data, rng: _flipped(data, rng),
    "truncate": lambda data, rng: data[: rng.randrange(len(data))] if data else data,
    "empty": lambda data, rng: b"",
    "delete": lambda data, rng: None,
    "noise": lambda data, rng: _noise(data, rng),
}


def _flipped(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    if found:
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _noise(data: bytes, rng: random.Random) -> bytes:
    """Replace a byte with one that is invalid in UTF-8."""
    found = bytearray(data)
    if found:
        found[rng.randrange(len(found))] = 0xFF
    return bytes(found)


def _files(world: World, part: str) -> list[Path]:
    """Return the files of a part of the run that may be damaged."""
    root = world.run.root
    found = sorted(
        path for path in root.rglob("*") if path.is_file() and "attempts" not in path.parts
    )
    chosen = {
        "journal": lambda path: path.parent.name == "journal",
        "metrics": lambda path: path.name in ("metrics.jsonl", "samples.jsonl"),
        "ledger": lambda path: path.name == "ledger.jsonl",
        "checkpoint": lambda path: any(name.startswith("iter_") for name in path.parts),
        "any": lambda path: True,
    }[part]
    return [path for path in found if chosen(path)]


def _damage(stage: Stage) -> list[Problem]:
    """Damage a file between two attempts.

    WHAT: flip|truncate|empty|delete|noise:PART[:kill]; "kill" also kills the next attempt.
    """
    world, trial, rng = stage.world, stage.trial, stage.rng
    how, part, *then = trial.what.split(":")
    world.attempt(KillAt(trial.number))
    problems = oracle.destroyed(world)
    files = _files(world, part)
    if not files:
        return problems
    path = rng.choice(files)
    before = path.read_bytes()
    after = DAMAGES[how](before, rng)
    stage.note = f"{path.relative_to(world.run.root)}"
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    world.disk.model.adopt()
    lost = (
        _lost_steps(before, b"" if after is None else after) if path.suffix == ".jsonl" else set()
    )
    is_metrics, is_samples = path.name == "metrics.jsonl", path.name == "samples.jsonl"
    since = oracle.num_committed(world)
    if then:
        world.attempt(KillAt(rng.randrange(stage.reference.num_changes)))
        problems += oracle.destroyed(world, since)
    ending = world.attempt()
    if _says_what_is_lost(ending) and "iter_" in stage.note:
        stage.remark = "refused: its only checkpoints are damaged"
        return problems
    if ending.how != "done":
        stage.finish()
    found = check(
        world,
        reference=stage.reference,
        was_killed=False,
        lost_lines=lost if is_metrics else (),
        lost_samples=lost if is_samples else (),
        committed_since=since,
    )
    return problems + found


def _says_what_is_lost(ending: Ending) -> bool:
    """Whether a run refused to start from scratch because its only checkpoints are damaged."""
    return ending.how == "failed" and any(
        "though some were committed" in each for each in ending.messages
    )


def _lost_steps(before: bytes, after: bytes) -> set[int]:
    """Return the steps of the lines that were changed or removed."""
    intact = set(after.split(b"\n")[:-1])
    found = set()
    for line in before.split(b"\n"):
        if line and line not in intact:
            try:
                found.add(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
    return found


def _two_attempts(stage: Stage) -> list[Problem]:
    """Pause attempt A at an operation, let B take over, then resume A.

    WHAT: before|after:end|some. A pauses before or after the operation; B runs to its end, or to
    some operation before A is resumed.
    """
    world, trial, rng = stage.world, stage.trial, stage.rng
    when, until = trial.what.split(":")[:2]
    if trial.seed % 3 == 2:  # a run that already has files of a killed attempt
        world.attempt(KillAt(rng.randrange(stage.reference.num_changes)))
    older = Paused(world)
    older.run_until(trial.number, when)
    newer = Paused(world)
    newer.run_until(None if until == "end" else rng.randrange(stage.reference.num_changes))
    is_late = rng.random() < 0.5
    if not older.is_over:
        older.attempt.clock += 1000.0 if is_late else 0.0
        older.run_until(None)
    if not newer.is_over:
        newer.run_until(None)
    by_name = {ending.attempt.name: ending for ending in world.endings}
    old, new = by_name[older.attempt.name], by_name[newer.attempt.name]
    stage.note = f"older {old.how}, newer {new.how}"
    problems = []
    # simultaneous claims may fence each other (rlpost/durable/ownership.py)
    if old.how == new.how == "refused":
        stage.remark = "both attempts ended, by their claims"
    elif new.how == "refused" and old.how != "done":
        problems.append(
            Problem(oracle.FENCED, f"the newer attempt: {' | '.join(new.messages[-1:])[:300]}")
        )
    world.endings.remove(new)
    world.endings.append(new)
    if new.how == "done":
        problems += check(world, reference=stage.reference, was_killed=False)
    else:
        problems += oracle.destroyed(world)
    last = world.attempt()  # a requeue: the run can be resumed in any case
    if last.how != "done":
        stage.finish()
    return problems + check(world, reference=stage.reference, was_killed=False)


def _data(kind: str) -> list[str]:
    """Return the rows of a changed prompt file."""
    if kind == "grown":
        return rows(NUM_ROWS + 2)
    if kind == "shrunk":
        return rows(NUM_ROWS - 2, BAD_ROWS[:1])
    if kind == "worse":
        return rows(NUM_ROWS, (*BAD_ROWS, 1, 6, 9))
    if kind == "edited":
        return [line.replace("question", "riddle") for line in rows()]
    assert kind == "moved", kind
    return rows()[::-1]


SETTINGS: dict[str, dict[str, dict[str, object]]] = {
    "seed": {"rollout": {"rollout_seed": 7}},
    "batch": {"rollout": {"rollout_batch_size": 2}},
    "samples": {"rollout": {"n_samples_per_prompt": 3}},
    "rate": {"optimizer": {"lr": 1e-3}},
    "longer": {"rollout": {"num_rollout": NUM_STEPS + 2}},
}
DATA = ("grown", "shrunk", "worse", "edited", "moved")


def _change(stage: Stage) -> list[Problem]:
    """Change data or settings after a kill: the run must refuse, or warn and name the change."""
    world, trial = stage.world, stage.trial
    world.attempt(KillAt(trial.number))
    had_checkpoint = any(world.run.checkpoints.glob(f"{PREFIX}*/{COMMITTED}"))
    segments, _ = read_folder(world.run.checkpoints / "journal")
    had_journal = any(segment.records for segment in segments)
    stage.note = "with a checkpoint" if had_checkpoint else "journal only"
    if trial.what in DATA:
        world.write_data(_data(trial.what))
    else:
        world.changed = SETTINGS[trial.what]
    before = len(world.endings)
    ending = world.attempt()
    text = " ".join(ending.messages)
    problems = oracle.of_ending(ending)
    if "shared with another run" in text:
        problems.append(Problem(oracle.NEVER, f"{stage.note}: it blames another run"))
    if ending.how in ("refused", "failed"):
        return problems
    if ending.how != "done":
        return [*problems, Problem(oracle.NEVER, ending.how)]
    num_steps = NUM_STEPS + 2 if trial.what == "longer" else NUM_STEPS
    is_said = any(word in text for word in ("--prompt-data", "prompt", "settings", "data"))
    is_used = len(world.endings[before - 1].attempt.observed.history) > 0 and (
        had_checkpoint or had_journal
    )
    problems += check(world, was_killed=False, num_steps=num_steps, same_data=False)
    mixed = (
        oracle.of_history(world, ending.attempt.observed.history, num_steps)
        if trial.what in DATA
        else []
    )
    if trial.what in DATA and mixed and not is_said:
        problems.append(Problem(oracle.SILENT, f"{stage.note}: other data, {mixed[0]}"))
    if trial.what not in (*DATA, "longer") and is_used and not is_said:
        problems.append(Problem(oracle.SILENT, f"{stage.note}: another {trial.what}"))
    return problems


PLAYS: dict[str, Play] = {
    "kill": _kill,
    "power": _power,
    "stop": _stop,
    "fault": _fault,
    "sequence": _sequence,
    "damage": _damage,
    "two_attempts": _two_attempts,
    "change": _change,
}
ASYNC_SLOW = ("sync,slow_save", "one_step_off,slow_save", "fully_async,slow_save")


KEEPS_FEW = ("sync,keep1", "sync,keep_every")


def trials(base: Path, scenario: str, seed: int) -> Iterator[Trial]:
    """Yield all trials of a scenario: one per operation where feasible, else a sample by seed."""
    rng = random.Random(f"{scenario}/{seed}")
    yield from _TRIALS[scenario](base, rng)


def _kills(base: Path, rng: random.Random) -> Iterator[Trial]:
    for name, setup in SETUPS.items():
        ops = [op for op in baseline(base, setup).ops if op.changes]
        for op in ops:
            yield Trial("kill", name, "before", op.number)
            if op.kind == "write":
                yield Trial("kill", name, "torn", op.number)
    for _ in range(1200):
        yield Trial("kill", *_place(base, rng, "repeated"))
    for _ in range(600):
        yield Trial("kill", *_place(base, rng, "lagging"))


def _powers(base: Path, rng: random.Random) -> Iterator[Trial]:
    for name, setup in SETUPS.items():
        for number in range(baseline(base, setup).num_changes):
            yield Trial(
                "power",
                name,
                rng.choice(("strict", "strict", "data")),
                number,
                rng.randrange(10**6),
            )
    for _ in range(1500):
        variant = rng.choice(VARIANTS) + rng.choice(("", "*2", "*3"))
        yield Trial("power", *_place(base, rng, variant))


def _stops(base: Path, rng: random.Random) -> Iterator[Trial]:
    for _ in range(1000):
        then = rng.choice(("", "", "+kill", *(f"+{variant}" for variant in VARIANTS)))
        yield Trial("stop", *_place(base, rng, rng.choice(tuple(DEADLINES)) + then))


def _faults(base: Path, rng: random.Random) -> Iterator[Trial]:
    for path in PATHS:
        for error in ("ENOSPC", "fsync", "hang", "short"):
            for _ in range(6):
                yield Trial(
                    "fault",
                    rng.choice(list(SETUPS)),
                    f"{error}:{path}",
                    rng.randrange(6),
                    rng.randrange(10**6),
                )
    for _ in range(1600):
        error = rng.choice((*ERRORS, "EIO", "ESTALE", "short", "fsync", "hang"))
        name = rng.choice(list(SETUPS))
        ops = baseline(base, SETUPS[name]).ops
        kinds = {"short": ("write",), "fsync": ("fsync",), "hang": HANGING}.get(error)
        count = sum(op.kind in kinds for op in ops) if kinds else sum(op.changes for op in ops)
        if error in ("EIO", "ESTALE"):
            count = len(ops)
        where = rng.choice(("once", "on")) + rng.choice(("", "", ":resume"))
        yield Trial("fault", name, f"{error}:{where}", rng.randrange(count), rng.randrange(10**6))


def _sequences(base: Path, rng: random.Random) -> Iterator[Trial]:
    for number in range(3000):
        first = list(DISTURBANCES)[number % len(DISTURBANCES)]
        what = f"{first}+{rng.choice(('kill', 'kill', 'power', 'stop'))}"
        yield Trial("sequence", *_place(base, rng, what, (*SETUPS, *WITH_ENVIRONMENT)))


def _damages(base: Path, rng: random.Random) -> Iterator[Trial]:
    parts = ("journal", "metrics", "ledger", "checkpoint", "any")
    for number in range(1500):
        what = f"{rng.choice(list(DAMAGES))}:{parts[number % len(parts)]}"
        yield Trial("damage", *_place(base, rng, what))
    for _ in range(600):
        what = f"{rng.choice(('flip', 'empty', 'delete', 'truncate'))}:journal"
        yield Trial("damage", *_place(base, rng, what, ASYNC_SLOW))
    for _ in range(200):
        yield Trial("damage", *_place(base, rng, "flip:checkpoint:kill", KEEPS_FEW))


def _pairs(base: Path, rng: random.Random) -> Iterator[Trial]:
    for _ in range(2000):
        what = f"{rng.choice(('before', 'after'))}:{rng.choice(('end', 'some'))}"
        yield Trial("two_attempts", *_place(base, rng, what))


def _changes(base: Path, rng: random.Random) -> Iterator[Trial]:
    for _ in range(600):
        yield Trial("change", *_place(base, rng, rng.choice((*DATA, *SETTINGS))))


def _place(
    base: Path, rng: random.Random, what: str, setups: tuple[str, ...] = tuple(SETUPS)
) -> tuple[str, str, int, int]:
    """Draw a configuration and one of its operations."""
    name = rng.choice(setups)
    setup = {**SETUPS, **WITH_ENVIRONMENT}[name]
    return name, what, rng.randrange(baseline(base, setup).num_changes), rng.randrange(10**6)


_TRIALS: dict[str, Callable[[Path, random.Random], Iterator[Trial]]] = {
    "kill": _kills,
    "power": _powers,
    "stop": _stops,
    "fault": _faults,
    "sequence": _sequences,
    "damage": _damages,
    "two_attempts": _pairs,
    "change": _changes,
}
assert _TRIALS.keys() == PLAYS.keys()
