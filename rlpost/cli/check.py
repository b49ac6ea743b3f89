"""``rlpost check RECIPE``: report all problems of a recipe, or its arithmetic.

Input: a recipe, a cluster profile, flags.
Output: a table of GPUs, batches and memory; or all problems and exit code 2. Imports neither torch
nor the training stack; a second process imports transformers (``rlpost.cli.stack_check``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.run_folder import RunFolder
from common.units import count_text, counted, size_text
from rlpost.cli.check_settings import check, notes
from rlpost.cli.command_line import make_parser, no_recipe, settings
from rlpost.cli.job import as_the_job_would, job_spec, time_notes
from rlpost.cli.stack_check import StackCheck
from rlpost.cli.terminal import named_lines, terminal_width
from rlpost.cli.waiting_notes import CHECKS, explained
from rlpost.config import extensions
from rlpost.config.arguments import add_switch
from rlpost.config.checks.missing import image_problems
from rlpost.config.engine_groups import engine_groups
from rlpost.config.load import Loaded
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.tree import Config
from rlpost.config.wording import near_path, with_origins, with_values
from rlpost.errors import ConfigError, WeightError
from rlpost.models.config_file import read_config
from slurm.errors import SpecError
from slurm.variables import unknown_variables

_INDENT = 14
EXIT_PROBLEMS = 2  # as for every command with invalid settings


JSON = "--json"


def main(arguments: Sequence[str]) -> int:
    """Check and show.

    With --json standard output is one object, also for settings that cannot be loaded.
    """
    try:
        return _check(arguments)
    except ConfigError as error:
        if JSON not in arguments:
            raise
        return _print_object(None, str(error).splitlines())


def _check(arguments: Sequence[str]) -> int:
    parser = make_parser("rlpost check", "Check a recipe and show its arithmetic.")
    add_switch(parser, JSON, "print a JSON object: ok, problems, notes, arithmetic")
    if JSON not in arguments:  # first: a misspelled variable may be the cause of the problems
        for note in unknown_variables(os.environ):
            print(f"note: {note}", file=sys.stderr)
    options, loaded = settings(parser, arguments)
    if options.recipe is None and not loaded.origins:
        raise no_recipe("rlpost check tiny")
    stack_notes: list[str] = []
    with explained(CHECKS):
        stack = StackCheck(loaded.config)
        problems = check_problems(loaded, options.recipe)
        if problems:
            stack.cancel()
        else:
            problems, stack_notes = stack.finish()
    if options.json:
        return _print_object(loaded.config, problems, stack_notes)
    if problems:
        raise ConfigError("\n".join(problems))
    said = [*notes(loaded.config), *time_notes(loaded.config), *stack_notes]
    lines = [*arithmetic(loaded.config), *(("note", text) for text in said)]
    width = max(_INDENT, *(len(name) + 2 for name, _ in lines))
    print("\n".join(named_lines(lines, width, terminal_width())))
    return 0


def check_problems(loaded: Loaded, recipe: str | None) -> list[str]:
    """One line for each problem of the settings and of the Slurm job they request.

    The container is the one that a job submitted on this host would get; a batch file of jobs/
    mounts $RLPOST_HOME.
    """
    problems: list[str] = []
    home = os.environ.get("RLPOST_HOME")
    mounted = (home,) if home else ()
    seen = loaded.config
    if not image_problems(seen):
        try:
            seen = as_the_job_would(seen)[0]
        except ConfigError as error:
            problems += str(error).splitlines()
            # a missing container is reported already, and its consequences are not worth a line
            seen = with_values(seen, container="none")
    try:
        check(seen, mounted=mounted, recipe=recipe, origins=loaded.origins)
    except ConfigError as error:
        problems += str(error).splitlines()
    if image_problems(loaded.config):  # reported already; the job would report it again
        return problems
    try:
        _make_jobs(loaded.config)
    except (ConfigError, SpecError) as error:
        problems += (
            with_origins(line, loaded.config, loaded.origins) for line in str(error).splitlines()
        )
    return problems


def _make_jobs(config: Config) -> None:
    """Make the jobs of a run as a submission would. Raises ConfigError, SpecError."""
    job_spec(config)
    for part in extensions.job_parts():
        # no folder has this name: the current one may be that of a run, which has jobs already
        part.check(config, RunFolder(Path.cwd() / "new-run"))


def _print_object(
    config: Config | None, problems: list[str], stack_notes: Sequence[str] = ()
) -> int:
    """Print the result as JSON on standard output, with or without problems."""
    content: dict[str, Any] = {
        "ok": not problems,
        "problems": problems,
        "notes": unknown_variables(os.environ),
        "arithmetic": {},
    }
    if config is not None and not problems:
        content["notes"] += [*notes(config), *time_notes(config), *stack_notes]
        content["arithmetic"] = dict(arithmetic(config))
    print(json.dumps(content, indent=2))
    return EXIT_PROBLEMS if problems else 0


def arithmetic(config: Config) -> list[tuple[str, str]]:
    """Sizes of a valid run, derived from its settings: (name, arithmetic)."""
    cluster, rollout = config.cluster, config.rollout
    total = config.num_nodes * cluster.num_gpus_per_node
    trains, generates = config.actor_world_size, config.rollout_num_gpus
    data = config.data_parallel_size
    joining = config.num_joining_engines
    a_step = config.samples_per_rollout // config.num_steps_per_rollout
    lines = [
        (
            "GPUs",
            f"{counted(config.num_nodes, 'node')} x {cluster.num_gpus_per_node} = {total}: {trains} train, "
            f"{'the same' if cluster.colocate else generates} generate"
            + (f", {config.num_group_gpus} in other groups" if config.num_group_gpus else ""),
        ),
        ("trainer", f"{counted(trains, 'rank')} = {_layout(config)}"),
        (
            "engines",
            ", ".join(config.sglang.rollout_external_engine_addrs)
            or f"{counted(generates, 'GPU')} / {cluster.rollout_num_gpus_per_engine} an engine = {config.num_engines}"
            + (f", and {joining} on other jobs" if joining else ""),
        ),
        *_group_lines(config),
        (
            "rollout",
            f"{counted(rollout.rollout_batch_size, 'prompt')} x {counted(rollout.n_samples_per_prompt, 'answer')} = "
            f"{counted(config.samples_per_rollout, 'sample')}, {counted(rollout.num_rollout, 'time')}",
        ),
        (
            "batch",
            f"{counted(config.samples_per_rollout, 'sample')} / "
            f"{counted(config.num_steps_per_rollout, 'optimizer step')} = {a_step}; "
            f"/ DP {data} = {a_step // data} a rank",
        ),
    ]
    return [*lines, *_model_lines(config), *_file_lines(config)]


def _group_lines(config: Config) -> list[tuple[str, str]]:
    """Lines about the groups of engines beside the policy's."""
    lines = []
    for name, group in engine_groups(config).items():
        words = ", ".join(group.settings.url)
        if group.settings.is_started:
            size = group.settings.gpus_per_engine(config.cluster.num_gpus_per_node)
            count = group.settings.engines
            words = f"{counted(count, 'engine')} x {counted(size, 'GPU')} = {count * size}"
            words += ", on other jobs" if group.settings.fleet else ""
        lines.append((f"engines {name}", words))
    return lines


def _layout(config: Config) -> str:
    perf = config.perf
    sizes = (("PP", perf.pipeline_model_parallel_size), ("CP", perf.context_parallel_size))
    parts = [
        f"TP {perf.tensor_model_parallel_size}",
        *(f"{name} {size}" for name, size in sizes if size > 1),
    ]
    text = " x ".join([*parts, f"DP {config.data_parallel_size}"])
    if perf.expert_model_parallel_size == 1:
        return text
    expert_tensor = perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size
    return f"{text}; experts over EP {perf.expert_model_parallel_size} x ETP {expert_tensor}"


def _model_lines(config: Config) -> list[tuple[str, str]]:
    hf = read_config(config.checkpoint.hf_checkpoint)
    name = ", ".join(hf.get("architectures") or ["model"])
    try:
        shape = hf_shape(hf)
    except WeightError as error:
        return [("model", f"{name}: {error}; memory is not estimated")]
    parameters = shape.parameters
    routed = f", {count_text(parameters.expert)} of them in experts" if parameters.expert else ""
    model, lines = f"{name}, {count_text(parameters.total)} parameters{routed}", []
    if extensions.has_arithmetic():
        lines = extensions.arithmetic(config, hf)
    else:
        model += "; memory is not estimated: this installation has no extension for it"
    return [("model", model), *lines]


def _file_lines(config: Config) -> list[tuple[str, str]]:
    files = [("prompts", path) for path in config.rollout.prompt_data]
    files += [(f"eval {name}", path) for name, path in config.eval_sets]
    sizes = [
        path.stat().st_size for path in Path(config.checkpoint.hf_checkpoint).glob("*.safetensors")
    ]
    found = f"{near_path(config.checkpoint.hf_checkpoint)}: {counted(len(sizes), 'file')}, {size_text(sum(sizes))}"
    return [
        ("weights", found),
        *((name, f"{near_path(path)}: {size_text(_stored(path))}") for name, path in files),
    ]


def _stored(path: str) -> int:
    """Bytes of a prompt file; ``PATH@[A:B]`` is a slice of one."""
    return Path(path.partition("@[")[0]).stat().st_size
