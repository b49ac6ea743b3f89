"""``rlpost compare``: compare several runs in the terminal, on one page, or as JSON.

With ``--fail-if`` it is a regression gate: exit code 1 when a run falls behind the first one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from common.files import write_atomic
from rlpost.cli.runs import add_runs_dir, find_run
from rlpost.cli.terminal import aligned, terminal_width
from rlpost.config.arguments import Parser, add_switch
from rlpost.config.wording import near_path
from rlpost.errors import ConfigError
from rlpost.extensions.watching.pace import PACE_STEPS
from rlpost.extensions.watching.report.compare import (
    Gate,
    GateOutcome,
    compare_page,
    comparison,
    figures,
    labels,
    outcome,
    parse_gate,
)
from rlpost.extensions.watching.report.run_facts import RunFacts, read_facts


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost compare RUN RUN [RUN ...]``; 1 when a gate fails, else 0."""
    parser = Parser(
        prog="rlpost compare",
        description="Compare runs: figures here, curves and settings on a page. Exit code 1 if a gate fails.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder, name or job id, two or more"
    )
    add_runs_dir(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--html",
        "--out",
        dest="out",
        type=Path,
        metavar="FILE",
        help="write the page to this file (default: report/compare.html of the first run)",
    )
    add_switch(output, "--json", "print figures and differing settings for programs")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="METRIC:CHANGE",
        help="fail if a metric of a run changes by more than this from the first run's, such as "
        "reward/mean:-2%% or time/step_s:+1.5; repeatable",
    )
    parser.add_argument(
        "--last",
        type=int,
        default=PACE_STEPS,
        metavar="N",
        help=f"steps at the end whose mean --fail-if compares (default: {PACE_STEPS})",
    )
    options = parser.parse_args(arguments)
    gates = [parse_gate(text) for text in options.fail_if]
    if options.last < 1:
        raise ConfigError(f"--last {options.last}: must be at least 1 step")
    runs = list(dict.fromkeys(find_run(word, options.runs_dir) for word in options.runs))
    if len(runs) < 2:
        raise ConfigError(
            f"rlpost compare: needs two runs or more, got {runs[0].root}; rlpost report shows one"
        )
    facts = [read_facts(run) for run in runs]
    if not any(one.lines for one in facts):
        raise ConfigError("rlpost compare: none of these runs has a step yet; see rlpost list")
    outcomes = _outcomes(gates, facts, options.last)
    if options.json:
        content = comparison(facts) | {"gates": [asdict(one) for one in outcomes]}
        print(json.dumps(content, indent=2))
    else:
        path = options.out or runs[0].report / "compare.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, compare_page(facts))
        lines = table(labels(facts), figures(facts), terminal_width())
        print(
            "\n".join([*lines, "", *(one.line for one in outcomes), f"page {near_path(str(path))}"])
        )
    return int(any(one.fails for one in outcomes))


def _outcomes(
    gates: Sequence[Gate], facts: Sequence[RunFacts], num_steps: int
) -> list[GateOutcome]:
    """Apply each gate to each run after the first, which is the baseline."""
    names = labels(facts)
    return [
        outcome(gate, facts[0].lines, run.lines, names=(names[0], name), num_steps=num_steps)
        for gate in gates
        for name, run in zip(names[1:], facts[1:], strict=True)
    ]


def table(
    names: Sequence[str], values: Mapping[str, Sequence[str]], width: int | None
) -> list[str]:
    """Return the figures of runs as columns; letters stand for names that do not fit."""
    rows = [["", *names], *([name, *cells] for name, cells in values.items())]
    lines = aligned(rows, None)
    if width is None or max(map(len, lines)) <= width:
        return lines
    letters = [chr(ord("A") + number % 26) * (1 + number // 26) for number in range(len(names))]
    rows[0] = ["", *letters]
    legend = [f"{letter}  {name}" for letter, name in zip(letters, names, strict=True)]
    return [*legend, "", *aligned(rows, width)]
