"""Say which tasks of a folder run here, and why the others do not.

    python -m rlpost.extensions.agents.environments.harbor.check FOLDER [--oracle]

Without an option the files are read. --oracle also runs the task's solution in place of an agent, in
a sandbox of this node with the task's image, and its verifier, which must give 1.
Output: a line for each task that does not pass, with the reason, and a count of each reason; a note
on each task whose rewards may teach an agent to fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.terminal import visible_output
from rlpost.errors import RlpostError
from rlpost.extensions.agents.environments.harbor.roots import BUILD
from rlpost.extensions.agents.environments.harbor.runnable import RunnableTask
from rlpost.extensions.agents.environments.harbor.tasks import HarborTask
from rlpost.extensions.agents.environments.harbor.trial import Trial
from rlpost.extensions.agents.environments.of_harbor import options_of, prompts, sort_tasks
from rlpost.extensions.agents.references import resolve_references
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.local import Root
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits, Pool

EXIT_SOME, EXIT_WRONG = 1, 2
SHOWN = 1500  # characters of a reason


@dataclass(frozen=True)
class Outcome:
    """What became of a task. ``reason`` is empty if it passed."""

    task: str
    reason: str = ""
    reward: float | None = None
    seconds: float = 0.0


async def try_oracle(task: RunnableTask, pool: Pool, archives: Archives) -> Outcome:
    """Run the solution of each step of a task and its verifier."""
    name = task.task.name
    for step in task.task.steps:
        if not (task.task.folder / step.solution / "solve.sh").is_file():
            return Outcome(name, f"it has no {step.solution}/solve.sh")
    trial, seconds = Trial(task, pool, archives), 0.0
    try:
        await trial.begin()
        solved = await trial.run_solution()
        while trial.has_next:
            seconds += trial.used_seconds
            if not await trial.finish_step():
                break
            solved = await trial.run_solution()
        verdict = await trial.verify()
    finally:
        await trial.close()
    reason = ""
    if verdict.score < 1:
        how = f"solution/solve.sh: {solved.ended.value} {solved.exit_code}: {solved.text[-500:]}"
        reason = f"the solution gets {verdict.score:g}\n{how}\n{verdict.reason}"
    return Outcome(name, reason, verdict.score, seconds + trial.used_seconds)


async def try_all(tasks: Sequence[RunnableTask], pool: Pool, *, jobs: int) -> list[Outcome]:
    """Run the solution of each task, ``jobs`` at a time; print each that does not pass."""
    places = asyncio.Semaphore(jobs)

    async def one(task: RunnableTask, archives: Archives) -> Outcome:
        async with places:
            try:
                outcome = await try_oracle(task, pool, archives)
            except RlpostError as error:
                outcome = Outcome(task.task.name, str(error))
        _print_reason(outcome)
        return outcome

    with tempfile.TemporaryDirectory(prefix="rlpost-harbor-") as folder:
        archives = Archives(Path(folder))
        async with pool:
            return list(await asyncio.gather(*(one(task, archives) for task in tasks)))


def note_of(task: HarborTask) -> str:
    """Return what the rewards of a task that runs may teach wrongly; '' if nothing is known."""
    gates = [step.name for step in task.steps[:-1] if step.least]
    if not gates:
        return ""
    return (
        f"note: an agent that misses min_reward of {', '.join(gates)} keeps the reward up to there, "
        "which may be more than it gets for going on and failing a later step; remove min_reward to "
        "count later steps as 0"
    )


def kind_of(reason: str) -> str:
    """Return a reason without the names that differ between tasks, for counting.

    >>> kind_of("environment/Dockerfile describes a root that is not built; build one where ...")
    'environment/Dockerfile describes a root that is not built'
    """
    first = reason.strip().splitlines()[0].partition(BUILD[:11])[0]
    first = re.sub(r"(requirement|not supported|sandbox) .*", r"\1", first)
    return ":".join(first.split(":")[:5]).strip()[:120]


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a task does not pass."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.extensions.agents.environments.harbor.check",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument("folder", help="a folder with tasks, at any depth")
    parser.add_argument("--oracle", action="store_true", help="run each solution and its verifier")
    parser.add_argument("--env-args", type=json.loads, default={}, help="arguments of the tasks")
    parser.add_argument("--limit", type=int, help="the first tasks alone")
    parser.add_argument("--jobs", type=int, default=2, help="sandboxes at a time")
    parser.add_argument("--memory-mib", type=int, default=1024, help="for tasks that name none")
    parser.add_argument("--disk-mib", type=int, default=1024, help="files of one sandbox")
    parser.add_argument("--read-only", action="append", default=[], help="a folder to show as well")
    parser.add_argument("--out", type=Path, help="write the prompts of the tasks that pass")
    parser.add_argument("--label", default="harbor", help="of the environment, for --out")
    parser.add_argument("--json", type=Path, help="write one line for each task that was tried")
    arguments = parser.parse_args(argv)
    try:
        env_args = resolve_references(arguments.env_args, os.environ)
    except KeyError as error:
        parser.error(f"--env-args: the variable {error.args[0]} is not set, or has no key for it")
    try:
        options = options_of(arguments.folder, env_args)
        running, skipped = sort_tasks(arguments.folder, options, arguments.limit)
        without = [Outcome(each.name, each.reason) for each in skipped]
        for outcome in without:
            _print_reason(outcome)
        for task in running:
            if note := note_of(task.task):
                print(f"{task.task.name}: {note}")
        outcomes = [Outcome(task.task.name) for task in running]
        if arguments.oracle:
            limits = Limits(memory_mib=arguments.memory_mib, disk_mib=arguments.disk_mib)
            root = Root(read_only=tuple(arguments.read_only))
            pool = LocalPool(limits, size=arguments.jobs, warm=0, root=root)
            outcomes = asyncio.run(try_all(running, pool, jobs=arguments.jobs))
    except RlpostError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG
    passed = {outcome.task for outcome in outcomes if not outcome.reason}
    failed = without + [outcome for outcome in outcomes if outcome.reason]
    _print_counts(failed)
    print(f"{len(passed)} of {len(outcomes) + len(skipped)} tasks run")
    if arguments.out is not None:
        rows = prompts([task for task in running if task.task.name in passed], arguments.label)
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if arguments.json is not None:
        lines = [json.dumps(asdict(outcome)) + "\n" for outcome in outcomes]
        arguments.json.write_text("".join(lines))
    return EXIT_SOME if failed else 0


def _print_reason(outcome: Outcome) -> None:
    if outcome.reason:
        print(f"{outcome.task}: {outcome.reason[:SHOWN]}", flush=True)


def _print_counts(failed: Sequence[Outcome]) -> None:
    counts = Counter(kind_of(outcome.reason) for outcome in failed)
    if counts:
        print("\nreasons:")
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}")


if __name__ == "__main__":
    with visible_output():
        sys.exit(main())
