"""``rlpost rehearse RECIPE``: run every rank of a recipe on this machine.

Needs neither a GPU nor data.

Input: a recipe, a cluster profile, flags. Output: a table of checks, a bar for each rank and phase,
and exit code 2 with the first fault in one sentence; with --json the same as one object.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from common.jit_caches import jit_cache_environment
from rlpost.cli.command_line import make_parser
from rlpost.cli.planned_gpus import EXIT_NO_FIT, add_gpus, parse_size, read_planned_recipe
from rlpost.config.arguments import add_switch
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.layout import layout_problems
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.rehearsal.nodes import nodes_check

if TYPE_CHECKING:
    from rlpost.extensions.rehearsal.all_ranks.result import RehearsalResult


def main(arguments: Sequence[str]) -> int:
    """Rehearse a recipe."""
    parser = make_parser(
        "rlpost rehearse",
        "Run every rank of a recipe for one step without GPUs and without data, and check the result.",
    )
    add_gpus(parser)
    add_switch(
        parser,
        "--all-ranks",
        "run the step on every rank; by default on two of each class of equal ranks",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="rehearse N micro-batches of the step (default: pipeline stages + 1)",
    )
    add_switch(parser, "--json", "print one object")
    options, config = read_planned_recipe(parser, arguments)
    if options.micro_batches is not None and options.micro_batches < 1:
        raise ConfigError(f"--micro-batches {options.micro_batches}: give at least 1")
    result = rehearse_config(
        config,
        gpu_bytes=parse_size(options.gpu_memory),
        all_ranks=options.all_ranks,
        micro_batches=options.micro_batches,
    )
    if options.json:
        from rlpost.extensions.rehearsal.all_ranks.result import (
            as_object,  # imports the training stack
        )

        print(json.dumps(as_object(result), indent=2))
    else:
        print(text(result))
    return 0 if result.first_fault is None else EXIT_NO_FIT


def rehearse_config(
    config: Config,
    *,
    gpu_bytes: int,
    all_ranks: bool = False,
    micro_batches: int | None = None,
) -> RehearsalResult:
    """Rehearse a configuration; progress goes to standard error.

    Raises:
        ConfigError: the layout is not possible, a GPU is visible, or the training stack is missing.
    """
    if problems := [*layout_problems(config), *batch_problems(config)]:
        raise ConfigError("\n".join(problems))
    if not config.num_engines:
        raise ConfigError(
            "a rehearsal needs engines of this run, and --rollout-num-gpus is 0 or the engines are "
            "external; use rlpost plan"
        )
    # Libraries print, and Megatron repeats each of its warnings for every rank.
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        os.environ.update(jit_cache_environment(os.environ))  # torch reads them at import
        try:
            from rlpost.extensions.rehearsal.all_ranks.run import RehearsalOptions, rehearse_run
        except ImportError as error:
            raise ConfigError(
                f"a rehearsal needs the training stack: {error}; install it as in docs/install.md"
            ) from error
        logging.getLogger("megatron").setLevel(logging.ERROR)
        options = RehearsalOptions(gpu_bytes, all_ranks, micro_batches)
        result = rehearse_run(config, options, say=_say)
    return replace(result, checks=(*result.checks, nodes_check(config)))


def rehearse_before_submission(config: Config, gpu_memory: str) -> None:
    """Rehearse a run that is about to be submitted, for GPUs of this memory.

    Raises:
        ConfigError: the first fault, or see ``rehearse_config``.
    """
    result = rehearse_config(config, gpu_bytes=parse_size(gpu_memory))
    print(text(result), file=sys.stderr)
    if result.first_fault is not None:
        raise ConfigError(f"--rehearse: {result.first_fault}; nothing was submitted")


def _say(words: str) -> None:
    print(f"rehearse: {words}", file=sys.stderr, flush=True)


def text(result: RehearsalResult) -> str:
    """The result for a terminal."""
    from rlpost.extensions.rehearsal.all_ranks.result import bars, fullest, gb, shortened

    lines = []
    for one in result.checks:
        answer = "ok" if not one.faults else f"{len(one.faults)} wrong"
        lines.append(f"{answer:<10}{one.name} ({one.extent})")
        lines += [f"          {fault}" for fault in one.faults[:5]]
    most = fullest(result)
    rehearsed_count, step_count = result.micro_batches
    lines += ["", *bars(result), ""]
    lines.append(
        f"rank {most.rank} is the fullest: {gb(most.highest)}; rlpost plan says "
        f"{gb(result.planned_bytes)}"
    )
    lines.append(f"{'':<20}{'planner':>12}{'rehearsal':>12}{'difference':>12}")
    lines += [f"{one.name:<20}{one.columns}" for one in result.compared]
    if len(result.ran) < len(result.memory):
        lines.append(
            f"ranks {shortened(result.ran)} ran, two of each of {len(result.classes)} classes of equal "
            "ranks, and agreed; --all-ranks runs the others too"
        )
    if rehearsed_count < step_count:
        lines.append(
            f"{rehearsed_count} of the {step_count} micro-batches of a step were rehearsed"
        )
    lines.append(f"{result.seconds:.0f} s, {gb(result.peak_host_bytes)} of memory")
    if result.first_fault is not None:
        lines.append(f"first fault: {result.first_fault}")
    return "\n".join(lines)
