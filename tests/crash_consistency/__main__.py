"""Run trials and print their results: ``python -m tests.crash_consistency --all``."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.crash_consistency.findings import finding
from tests.crash_consistency.scenarios import PLAYS, Result, Trial, run_trial, trials
from tests.crash_consistency.world import ready

PROGRESS_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Run the requested trials; return 0 when none has a problem."""
    options = _parser().parse_args(arguments)
    results: list[Result] = []
    with ready() as base:
        if options.trial:
            results = [run_trial(base, Trial.named(name)) for name in options.trial]
            for result in results:
                _tell(result)
        else:
            for scenario in PLAYS if options.all else options.scenario:
                results += _scenario(base, scenario, options.seed, options.limit)
    print(table(results))
    for result in results if options.failures else ():
        for problem in result.problems:
            print(f"{finding(result, problem)}\t{result.trial}\t{result.note}\t{problem}")
    return int(any(result.problems for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_consistency", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="all scenarios")
    what.add_argument(
        "--scenario", action="append", choices=list(PLAYS), help="one of them; may be repeated"
    )
    what.add_argument(
        "--trial", action="append", help="one trial, by the name that a table or a test gives"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    parser.add_argument(
        "--limit", type=int, help="run at most this many trials of a scenario, sampled from all"
    )
    parser.add_argument(
        "--failures", action="store_true", help="one line for each problem after the table"
    )
    return parser


def _scenario(base: Path, scenario: str, seed: int, limit: int | None) -> list[Result]:
    planned = list(trials(base, scenario, seed))
    if limit is not None and limit < len(planned):
        planned = random.Random(seed).sample(planned, limit)
    results, told = [], time.monotonic()
    for number, trial in enumerate(planned, start=1):
        # endings hold everything that an attempt did, which is too much to keep for all trials
        results.append(replace(run_trial(base, trial), endings=()))
        if time.monotonic() - told > PROGRESS_S or number == len(planned):
            told = time.monotonic()
            failed = sum(bool(result.problems) for result in results)
            print(
                f"{scenario}: {number} of {len(planned)} trials, {failed} with a problem",
                file=sys.stderr,
            )
    return results


def _tell(result: Result) -> None:
    print(f"{result.trial}  {result.note}")
    for ending in result.endings:
        print(f"  attempt {ending.attempt.name}: {ending.how} {ending.what}")
        for message in ending.messages:
            print(f"    {message}")
    for problem in result.problems:
        print(f"  {finding(result, problem)}  {problem}")


def table(results: Sequence[Result]) -> str:
    """Return a table with one line per scenario, and an example of each kind of problem."""
    lines = [
        "| scenario | trials | without a problem | problems | remarks |",
        "|---|---|---|---|---|",
    ]
    examples: dict[tuple[str, str, str], Trial] = {}
    for scenario in dict.fromkeys(result.trial.scenario for result in results):
        own = [result for result in results if result.trial.scenario == scenario]
        found: Counter[tuple[str, str]] = Counter()
        for result in own:
            kinds = {(finding(result, problem), problem.category) for problem in result.problems}
            found.update(kinds)
            for kind in kinds:
                examples.setdefault((*kind, scenario), result.trial)
        good = sum(not result.problems for result in own)
        told = "; ".join(
            f"{count} {category} ({name})" for (name, category), count in found.most_common()
        )
        remarks = Counter(result.remark for result in own if result.remark)
        remarked = "; ".join(f"{count} {remark}" for remark, count in remarks.most_common())
        lines.append(f"| {scenario} | {len(own):,} | {good:,} | {told or 'none'} | {remarked} |")
    if examples:
        lines += ["", "| finding | problem | trial |", "|---|---|---|"]
        lines += [
            f"| {name} | {category} | `{trial}` |"
            for (name, category, _), trial in sorted(examples.items(), key=str)
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
