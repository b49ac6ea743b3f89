"""``rlpost plan RECIPE``: estimate GPU memory, nodes and disks of a run before submitting it.

Input: a recipe, a cluster profile, flags; the model by its config.json, or by the published one
where the weights are not here yet. Output: a table, a bar for each phase, what does not fit and the
nearest layout that does (exit code 2); with --suggest the best layouts for that number of GPUs;
with --json the same as one object. Imports neither torch nor anything of the training stack.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from common.units import count_text, counted
from rlpost.cli.command_line import make_parser
from rlpost.cli.planned_gpus import EXIT_NO_FIT, add_gpus, parse_size, read_planned_recipe
from rlpost.cli.terminal import console, terminal_width
from rlpost.config.arguments import add_switch
from rlpost.config.checks.layout import layout_problems, model_problems
from rlpost.config.flags import flag
from rlpost.config.model_file import model_path, read_model
from rlpost.config.plan.cards import CARDS
from rlpost.config.plan.hf_shape import hf_shape, weight_bytes
from rlpost.config.plan.shape import Shape
from rlpost.config.tree import Config
from rlpost.config.wording import near_path
from rlpost.engines.server_args import check_server_args
from rlpost.errors import ConfigError, WeightError
from rlpost.extensions.planning.earlier_runs import earlier_step_times
from rlpost.extensions.planning.estimate import Estimate, MemoryPhase, Sizes, estimate
from rlpost.extensions.planning.layout_search import FittingLayout, layout_words, nearest, suggest
from rlpost.extensions.planning.plan_engines import (
    PlannedGroup,
    gb,
    loading_notes,
    planned_groups,
    route_words,
    update_rows,
)
from rlpost.extensions.planning.plan_time import time_object, time_rows
from rlpost.extensions.planning.rank_groups import crossing_words, planned_crossings
from rlpost.extensions.planning.rank_memory import notes_of
from rlpost.extensions.planning.rates import nearest_card
from rlpost.extensions.planning.save_interval import (
    WRITE_GBPS,
    SaveInterval,
    StepTimes,
    interval_words,
    save_interval,
)
from rlpost.extensions.planning.step_time import Faster, faster_settings
from rlpost.trainer.model_description import description_of

if TYPE_CHECKING:
    from rich.console import Console

NUM_SUGGESTED = 5
WIDTH, BAR = 110, 60
_BESIDE_BAR = 38  # the name of the phase, and its gigabytes
GLYPHS = {
    "weights": ("█", "blue"), "gradients": ("▓", "cyan"), "optimizer": ("▒", "magenta"), "activations": ("░", "green"),
    "logits": ("≡", "yellow"), "KV cache": ("○", "green"), "engine": ("●", "blue"), "buffers": ("=", "yellow"),
    "critic": ("◆", "magenta"), "CUDA, NCCL": ("·", "white"), "engine's CUDA": ("·", "white"),
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print the plan of a recipe."""
    parser = make_parser(
        "rlpost plan", "Estimate the GPU memory, nodes and disks that a recipe needs."
    )
    add_gpus(parser)
    parser.add_argument(
        "--write-gbps",
        type=float,
        default=WRITE_GBPS,
        metavar="GB/S",
        help="of a node to its disks (default: 2)",
    )
    parser.add_argument(
        "--step-s", type=float, metavar="S", help="seconds of a step; default: of an earlier run"
    )
    parser.add_argument(
        "--train-s",
        type=float,
        metavar="S",
        help="seconds of training in it (default: all of --step-s)",
    )
    add_switch(parser, "--suggest", "print the best layouts for the model on these GPUs")
    add_switch(parser, "--json", "print a JSON object instead of the tables")
    options, config = read_planned_recipe(parser, arguments)
    if options.write_gbps <= 0:
        raise ConfigError(
            f"--write-gbps {options.write_gbps:g}: give the GB/s of a node's disk, more than 0"
        )
    # the plan depends on these settings
    check_server_args(
        config.sglang.given_server_args, gpus_per_engine=config.cluster.rollout_num_gpus_per_engine
    )
    shape, width = model_of(config)
    gpu_bytes = parse_size(options.gpu_memory)
    speed = Speed(options.write_gbps, step_times(config, options.step_s, options.train_s))
    sizes = Sizes(gpu_bytes=gpu_bytes, engine_width=width)
    if options.json:
        content = plan_object(config, shape, sizes, speed, wants_suggestions=options.suggest)
        print(json.dumps(content, indent=2))
        return 0 if content["fits"] or (options.suggest and content["suggestions"]) else EXIT_NO_FIT
    columns = min(WIDTH, terminal_width() or WIDTH)
    out = console(columns, highlight=False)
    return show(out, config, shape, sizes, speed, wants_suggestions=options.suggest)


@dataclass(frozen=True, slots=True)
class Speed:
    """A node's write rate in GB/s, and the times of a step where they are known."""

    write_gbps: float = WRITE_GBPS
    times: StepTimes | None = None

    def interval(self, made: Estimate) -> SaveInterval:
        """The save interval for this estimate."""
        return save_interval(
            made.config,
            checkpoint_bytes=made.checkpoint_bytes,
            times=self.times,
            write_gbps=self.write_gbps,
        )


def step_times(config: Config, step_s: float | None, train_s: float | None) -> StepTimes | None:
    """The times given, else those of an earlier run. Raises ConfigError."""
    if step_s is None:
        if train_s is not None:
            raise ConfigError(
                f"--train-s {train_s:g} without --step-s; give both, or none for those of an earlier run"
            )
        return earlier_step_times(config)
    if step_s <= 0:
        raise ConfigError(f"--step-s {step_s:g}: give the seconds of a step, more than 0")
    if train_s is not None and not 0 < train_s <= step_s:
        raise ConfigError(
            f"--train-s {train_s:g}: give seconds of training within a step, at most --step-s {step_s:g}"
        )
    return StepTimes(step_s, step_s if train_s is None else train_s, "with the times given")


def show(
    out: Console,
    config: Config,
    shape: Shape,
    sizes: Sizes,
    speed: Speed,
    *,
    wants_suggestions: bool,
) -> int:
    """Print the plan and return the exit code."""
    problems, fits = size_problems(config), False
    if not problems:
        result = estimate(config, shape, **sizes)
        groups = planned_groups(config, shape, sizes["gpu_bytes"])
        problems = [*result.problems, *filter(None, (group.problem for group in groups))]
        fits = not problems
        out.print(
            table(
                result,
                speed,
                groups,
                faster_settings(result, CARDS[nearest_card(result.gpu_bytes)], sizes),
            )
        )
        out.print(bars(result, out.width))
        out.print()
        for note in [*notes_of(config, shape), *loading_notes(config, shape, sizes, groups)]:
            out.print(f"note: {note}", style="yellow")
    choices: list[FittingLayout] = []
    if wants_suggestions or not fits:
        choices = suggest(config, shape, **sizes)
    for problem in problems:
        out.print(f"does not fit: {problem}", style="red")
    if fits:
        out.print("fits", style="green")
    elif near := nearest(config, choices):
        out.print(f"the nearest layout that fits: {near.words}\n  {flags_of(near, config)}")
    else:
        out.print(
            "no layout of this model fits on these GPUs; use more (--gpus), or shorter responses"
        )
    if wants_suggestions and choices:
        out.print(suggestions(choices[:NUM_SUGGESTED]))
    return 0 if fits or (wants_suggestions and choices) else EXIT_NO_FIT


def plan_object(
    config: Config, shape: Shape, sizes: Sizes, speed: Speed, *, wants_suggestions: bool
) -> dict[str, object]:
    """Return the plan that ``show`` prints as an object for programs; sizes in bytes.

    ``suggestions`` holds the best layouts when they are asked for; else the nearest that fits if
    the recipe's does not.
    """
    problems = size_problems(config)
    content: dict[str, Any] = {
        "fits": False,
        "problems": problems,
        "note": "\n".join(notes_of(config, shape)) or None,
    }
    if not problems:
        result = estimate(config, shape, **sizes)
        groups = planned_groups(config, shape, sizes["gpu_bytes"])
        notes = [*notes_of(config, shape), *loading_notes(config, shape, sizes, groups)]
        content["note"] = "\n".join(notes) or None
        problems = [*result.problems, *filter(None, (group.problem for group in groups))]
        content |= {"fits": not problems, "problems": problems, **estimate_object(result)}
        content["groups"] = [asdict(group) for group in groups]
        content["save_interval"] = asdict(speed.interval(result))
        content["step_time"] = time_object(result, sizes)
    choices: list[FittingLayout] = []
    if wants_suggestions or not content["fits"]:
        choices = suggest(config, shape, **sizes)
    if not wants_suggestions:
        closest = nearest(config, choices)
        choices = [closest] if closest else []
    content["suggestions"] = [
        {"layout": choice.words, "reasons": choice.reasons, "flags": flags_of(choice, config)}
        for choice in choices[:NUM_SUGGESTED]
    ]
    return content


def estimate_object(result: Estimate) -> dict[str, object]:
    """An estimate's figures by name; sizes in bytes."""
    parameters, engine = result.shape.parameters, result.engine
    return {
        "layout": asdict(result.layout),
        "block_crossings": [
            asdict(kind) for kind in planned_crossings(result.config, result.layout)
        ],
        "parameters": {"total": parameters.total, "experts": parameters.expert},
        "gpu_bytes": result.gpu_bytes,
        "phases": [
            {"name": phase.name, "total": phase.total, "parts": dict(phase.parts)}
            for phase in result.phases
        ],
        "engine": None if engine is None else asdict(engine),
        "host_bytes_per_node": result.host_bytes_per_node,
        "checkpoint_bytes": result.checkpoint_bytes,
        "save_buffer_bytes_per_rank": result.save_buffer_bytes,
        "weight_update": None if result.update is None else asdict(result.update),
    }


def size_problems(config: Config) -> list[str]:
    """Parallel sizes that the GPUs or the model do not divide into."""
    if problems := layout_problems(config):
        return problems
    return model_problems(config, read_model(model_path(config.checkpoint)))


def model_of(config: Config) -> tuple[Shape, int]:
    """Return the model's shape, and the bytes of a weight in its engines."""
    path, folder = model_path(config.checkpoint), Path(config.checkpoint.hf_checkpoint)
    hf = read_model(path)
    try:
        if config.checkpoint.model_args:
            description_of(config)  # names those that contradict the file
        shape, width = hf_shape(hf), weight_bytes(hf)
    except WeightError as error:
        raise ConfigError(f"{near_path(str(path))}: {error}") from None
    if path.parent != folder and folder.name.endswith("FP8"):
        width = 1  # the published file is of the weights in bfloat16
    return replace(shape, mtp=config.grpo.enable_mtp_training), width


def table(
    result: Estimate,
    speed: Speed,
    groups: Sequence[PlannedGroup] = (),
    faster: Sequence[Faster] = (),
) -> Table:
    """Return the estimate as a table.

    Args:
        result: the estimate.
        speed: of disks and of an earlier run.
        groups: the engines beside the policy's.
        faster: settings that shorten a step.
    """
    config, layout, rank = result.config, result.layout, result.fullest
    shown = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column()
    parameters, rank_parameters = result.shape.parameters, count_text(rank.parameters.total)
    experts = f", {count_text(parameters.expert)} of them in experts" if parameters.expert else ""
    offloaded = f" and {gb(rank.optimizer_host)} on the host" if rank.optimizer_host else ""
    again = config.perf.recompute_granularity or "nothing"
    crossed = planned_crossings(config, layout)
    rows = [
        ("model", f"{count_text(parameters.total)} parameters{experts}"),
        ("trainer", f"{counted(layout.world, 'GPU')}: {layout_words(result)}"),
        *([("blocks", crossing_words(crossed))] if crossed else []),
        (
            "fullest rank",
            f"of stage {rank.stage} (of {layout.pipeline}): {rank_parameters} parameters",
        ),
        ("weights", f"{gb(rank.held.weights)}, gradients {gb(rank.held.gradients)}"),
        ("optimizer", f"{gb(rank.held.optimizer)}{offloaded}"),
        *([("critic", f"{gb(rank.critic.total)} in all")] if rank.critic.total else []),
        (
            "activations",
            f"{gb(rank.activations)} for {result.tokens} tokens a rank, recomputed: {again}",
        ),
        (
            "logits",
            gb(rank.logits) if rank.logits else f"on the last stage: {gb(result.ranks[-1].logits)}",
        ),
    ]
    if result.engine is not None:
        engine = result.engine
        text = f"weights {gb(engine.weights)}, KV cache {gb(max(0, engine.kv_cache))}"
        rows.append(("engine GPU", text))
        answers = max(0, engine.kv_tokens) // result.longest
        text = f"{max(0, engine.kv_tokens):,} tokens an engine: "
        text += f"{counted(answers, 'answer')} of {result.longest} tokens at once"
        rows.append(("KV cache", text))
        if config.grpo.use_rollout_routing_replay:
            rows.append(("routes", route_words(result, max(0, engine.kv_tokens))))
    rows += [(group.name, group.words) for group in groups]
    seconds = result.written_s(speed.write_gbps)
    rows += [
        ("host memory", f"{gb(result.host_bytes_per_node)} a node, besides Ray's and Python's"),
        (
            "checkpoint",
            f"{gb(result.checkpoint_bytes)}, {seconds:.0f} s at {speed.write_gbps:g} GB/s a node",
        ),
        ("its buffer", save_words(result, seconds)),
        ("save", interval_words(speed.interval(result), config.checkpoint.save_interval)),
    ]
    if result.update is not None:
        rows += update_rows(config, result.update)
    rows += time_rows(result, faster)
    for row in rows:
        shown.add_row(*row)
    return shown


def save_words(made: Estimate, seconds: float) -> str:
    """Host memory of a save, and when an optimizer step waits for it."""
    checkpoint, ranks = made.config.checkpoint, made.config.cluster.actor_num_gpus_per_node
    size, written = made.save_buffer_bytes, made.checkpoint_bytes_per_rank
    words = f"{gb(size)} of host memory a rank, {gb(size * ranks)} a node, for {gb(written)} that a rank writes"
    if not checkpoint.async_save or size >= written:
        return words
    return f"{words};\na step within {seconds * (1 - size / written):.0f} s of a save waits (--save-buffer-gb)"


def bars(result: Estimate, width: int = WIDTH) -> Text:
    """A bar for each phase with a legend; a whole bar is the memory of a GPU."""
    size = min(BAR, width - _BESIDE_BAR)
    text = Text("\n")
    seen: dict[str, None] = {}
    for phase in result.phases:
        text.append(f"{phase.name:<12}")
        text.append_text(_bar(phase, result.gpu_bytes, size))
        text.append(f" {gb(phase.total)} of {gb(result.gpu_bytes)}\n")
        seen |= dict.fromkeys(name for name, size in phase.parts if size)
    length = width
    for name in seen:
        if length + len(name) + 4 > width:
            text.append(("" if length == width else "\n") + " " * 12)
            length = 12
        glyph, style = GLYPHS[name]
        text.append(glyph, style=style)
        text.append(f" {name}  ")
        length += len(name) + 4
    return text


def _bar(phase: MemoryPhase, gpu_bytes: int, width: int) -> Text:
    bar, filled, end = Text(), 0.0, 0
    for name, size in phase.parts:
        filled += size / gpu_bytes * width
        glyph, style = GLYPHS[name]
        count = min(width + 4, round(filled)) - end
        bar.append(glyph * max(0, count), style=style)
        end += max(0, count)
    bar.append(" " * (width - end) + "|" if end <= width else ">")
    return bar


def suggestions(choices: Sequence[FittingLayout]) -> Table:
    """The best layouts, and below each its time and memory."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("layout, shortest step first")
    for choice in choices:
        shown.add_row(choice.words)
        shown.add_row(f"    {choice.reasons}")
    return shown


def flags_of(choice: FittingLayout, given: Config) -> str:
    """Return the flags that turn the recipe into this layout."""
    changed = []
    for group in ("perf", "cluster", "optimizer"):
        before, after = getattr(given, group), getattr(choice.config, group)
        for key, value in after:
            if value is not None and value != getattr(before, key):
                changed.append(f"{flag(key)} {str(value).lower()}")
    return " ".join(changed)
