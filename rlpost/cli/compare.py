"""``rlpost compare``: compare several runs on one page, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from common.files import write_atomic
from rlpost.arguments import Parser
from rlpost.cli.runs import add_runs_dir, find_run
from rlpost.errors import ConfigError
from rlpost.report.compare import compare_page, comparison
from rlpost.report.run_facts import read_facts


def main(arguments: Sequence[str]) -> int:
    """``rlpost compare RUN RUN [RUN ...] [--out FILE | --json]``."""
    made = Parser(prog="rlpost compare", description="Compare several runs on one page.")
    made.add_argument("runs", nargs="+", metavar="RUN", help="folder, name or job id, two or more")
    add_runs_dir(made)
    output = made.add_mutually_exclusive_group()
    output.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page (default: report/compare.html of the first)",
    )
    output.add_argument(
        "--json", action="store_true", help="print figures and differing settings for programs"
    )
    options = made.parse_args(arguments)
    runs = list(dict.fromkeys(find_run(word, options.runs_dir) for word in options.runs))
    if len(runs) < 2:
        raise ConfigError(
            f"rlpost compare: needs two runs or more, got {runs[0].root}; rlpost report shows one"
        )
    facts = [read_facts(run) for run in runs]
    if not any(one.lines for one in facts):
        raise ConfigError("rlpost compare: none of these runs has a step yet; see rlpost list")
    if options.json:
        print(json.dumps(comparison(facts), indent=2))
        return 0
    path = options.out or runs[0].report / "compare.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, compare_page(facts))
    print(path)
    return 0
