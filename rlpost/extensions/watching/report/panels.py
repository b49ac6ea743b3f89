"""The plots of a report and their curves. Pure.

Input: the lines of ``metrics.jsonl`` of one run or of several. Output: the panels that have data:
the main ones, and groups with every other metric, also those that rlpost does not declare.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlpost.extensions.watching.pace import PHASES
from rlpost.extensions.watching.report.plots import Curve
from rlpost.extensions.watching.series import not_finite, points
from rlpost.observe.metric_names import declared
from rlpost.observe.writer import eval_rewards

Lines = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    is_stacked: bool = False
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class PanelGroup:
    """Plots of metrics that the main plots leave out, and the names of those beyond MAX_OTHERS."""

    title: str
    panels: tuple[Panel, ...]
    left_out: tuple[str, ...] = ()


MAX_OTHERS = 300
"""Metrics of all groups that are drawn: a plugin may write thousands."""
CUSTOM = "custom"
_PASS_RATE = re.compile(r"eval/(?P<set>[^/]+)/pass@(?P<k>\d+)")


# title, unit, curves (label, metric); comparisons of runs draw only the first curve
_PLOTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Answer length",
        "tokens",
        (("mean", "rollout/response_length_mean"), ("longest", "rollout/response_length_max")),
    ),
    ("Entropy", "nats", (("entropy", "train/entropy"),)),
    (
        "KL",
        "nats",
        (
            ("to the reference (loss)", "train/ref_kl"),
            ("to the reference (reward)", "train/reward_kl"),
            ("to the teacher", "train/opd_reverse_kl"),
            ("to the old policy", "train/ppo_kl"),
        ),
    ),
    ("Gradient norm", "", (("gradient norm", "train/grad_norm"),)),
    ("Loss", "", (("loss", "train/loss"), ("policy gradient", "train/pg_loss"))),
    (
        "Clipped",
        "share of tokens",
        (
            ("low", "train/clip_frac_low"),
            ("high", "train/clip_frac_high"),
            ("dual", "train/dual_clip_frac"),
        ),
    ),
    (
        "Trainer against engine",
        "nats",
        (("log-prob difference", "train/rollout_logprob_abs_diff"), ("k3", "train/rollout_k3")),
    ),
    (
        "Cut off or repetitive",
        "share of answers",
        (("truncated", "rollout/truncated_frac"), ("repetitive", "rollout/repetitive_frac")),
    ),
    (
        "Groups",
        "number",
        (
            ("no spread", "rollout/zero_std_groups"),
            ("filtered", "rollout/num_filtered"),
            ("aborted", "rollout/num_aborted"),
        ),
    ),
    (
        "Staleness",
        "versions",
        (("mean", "rollout/staleness_mean"), ("oldest", "rollout/staleness_max")),
    ),
    (
        "Throughput",
        "tokens/s",
        (("throughput", "time/tokens_per_s"), ("for each GPU", "time/tokens_per_s_per_gpu")),
    ),
    (
        "Waiting",
        "share of a step",
        (("trainer", "time/trainer_waits_frac"), ("for answers", "time/generation_waited_frac")),
    ),
    ("Model FLOPs utilisation", "share", (("model FLOPs utilisation", "perf/mfu_frac"),)),
    (
        "Stragglers",
        "times the best",
        (
            ("slowest rank beside the fastest", "perf/straggler_peer_max"),
            ("beside its own best", "perf/straggler_own_max"),
        ),
    ),
    ("Weight sync", "s", (("weight sync", "sync/update_s"),)),
    (
        "Checkpoint",
        "s",
        (
            ("until it is committed", "checkpoint/total_s"),
            ("that training waited", "checkpoint/blocking_s"),
        ),
    ),
    (
        "Memory",
        "GB",
        (
            ("engine", "memory/engine_gb"),
            ("actor", "memory/actor_gb"),
            ("driver", "memory/driver_gb"),
            ("actor on its GPU, at most", "memory/actor_gpu_peak_gb"),
            ("reserved there", "memory/actor_gpu_reserved_gb"),
        ),
    ),
    (
        "Memory in use",
        "share",
        (
            ("of the fullest GPU", "memory/gpu_used_frac"),
            ("of the machine", "memory/host_used_frac"),
        ),
    ),
    ("Learning rate", "", (("learning rate", "train/lr"),)),
)
_AS_IT_IS = ("Learning rate", "Checkpoint", "Memory", "Memory in use")  # not smoothed
_DOTS = ("Checkpoint",)  # few points


def panels(lines: Lines) -> list[Panel]:
    """Return the main plots of one run, reward first."""
    found = [_reward(lines), *_pass_rates(lines)]
    found += [_panel(lines, *plot) for plot in _PLOTS]
    trained = [line for line in lines if "time/step_s" in line]
    phases = [
        Curve(label, points(trained, name), n, lost=not_finite(trained, name))
        for n, (label, name) in enumerate(PHASES)
    ]
    found.insert(-1, Panel("Phases of a step", "s", _present(phases), is_stacked=True))
    return [panel for panel in found if panel.curves]


def other_panels(runs: Sequence[tuple[str, Lines]], drawn: Iterable[str]) -> list[PanelGroup]:
    """Return a plot of each metric that is not in ``drawn``, grouped by area; custom ones last."""
    by_area: dict[str, list[str]] = {}
    names = dict.fromkeys(name for _, lines in runs for line in lines for name in line)
    known = set(drawn)
    for name in sorted(set(names) - known - {"step"}):
        metric = declared(name)
        by_area.setdefault(CUSTOM if metric is None else metric.area, []).append(name)
    groups, remaining = [], MAX_OTHERS
    for area in sorted(by_area, key=lambda area: (area == CUSTOM, area)):
        area_panels = [panel for name in by_area[area] if (panel := _single(runs, name)).curves]
        if area_panels:
            left_out = tuple(panel.title for panel in area_panels[remaining:])
            groups.append(PanelGroup(area, tuple(area_panels[:remaining]), left_out))
            remaining = max(0, remaining - len(area_panels))
    return groups


def drawn_names(lines: Lines) -> set[str]:
    """Return the metrics that ``panels`` draws."""
    found = {name for _, _, plotted in _PLOTS for _, name in plotted} | {"reward/mean"}
    found |= {name for _, name in PHASES}
    found.update(eval_rewards(*lines))
    for line in lines:
        found.update(name for name in line if _PASS_RATE.fullmatch(name))
    return found


def compared_panels(runs: Sequence[tuple[str, Lines]]) -> list[Panel]:
    """Return plots of several runs: of each panel the first metric that any run has."""
    return [
        panel
        for title, unit, name in _compared(runs)
        if (panel := _of_runs(runs, name, title, f"{name}, {unit}" if unit else name)).curves
    ]


def compared_names(runs: Sequence[tuple[str, Lines]]) -> set[str]:
    """Return the metrics that ``compared_panels`` draws."""
    return {name for _, _, name in _compared(runs)}


def _compared(runs: Sequence[tuple[str, Lines]]) -> list[tuple[str, str, str]]:
    """Title, unit and metric of each main plot of several runs."""
    wanted = [("Reward of the rollout", "mean", "reward/mean")]
    there = {name for _, lines in runs for line in lines for name in line}
    evals = eval_rewards(dict.fromkeys(there, 0.0))
    wanted += [(f"Evaluation: {name.split('/')[1]}", "mean reward", name) for name in evals]
    for title, unit, plotted in _PLOTS:
        names = [name for _, name in plotted if name in there]
        wanted += [(title, unit, names[0])] if names else []
    wanted += [("Time of a step", "s", "time/step_s")]
    return wanted + [(f"Time: {label}", "s", name) for label, name in PHASES]


def _of_runs(runs: Sequence[tuple[str, Lines]], name: str, title: str, unit: str) -> Panel:
    """One metric with a curve for each run that has it."""
    dots = name.startswith("eval/") or title in _DOTS
    curves = [
        _curve(lines, name, label, number, dots=dots, soften=title not in _AS_IT_IS, run=number)
        for number, (label, lines) in enumerate(runs)
    ]
    return Panel(title, unit, _present(curves))


def _single(runs: Sequence[tuple[str, Lines]], name: str) -> Panel:
    """The plot of one metric under its own name."""
    metric = declared(name)
    panel = _of_runs(runs, name, name, "" if metric is None else metric.unit)
    if len(runs) > 1:
        return panel
    curves = tuple(replace(curve, label=name) for curve in panel.curves)
    return replace(panel, curves=curves, meaning="" if metric is None else metric.meaning)


def _reward(lines: Lines) -> Panel:
    evals = eval_rewards(*lines)
    curves = [_curve(lines, "reward/mean", "rollout, mean", 0)]
    curves += [
        _curve(lines, name, name.split("/")[1], n, dots=True, soften=False)
        for n, name in enumerate(evals, 1)
    ]
    return Panel("Reward", "mean", _present(curves))


def _pass_rates(lines: Lines) -> list[Panel]:
    """A plot of each evaluation set that is answered several times per prompt."""
    by_set: dict[str, dict[int, str]] = {}
    for name in {name for line in lines for name in line}:
        if found := _PASS_RATE.fullmatch(name):
            by_set.setdefault(found["set"], {})[int(found["k"])] = name
    panels = []
    for label, rates in sorted(by_set.items()):
        curves = [
            _curve(lines, rates[k], f"pass@{k}", n, dots=True, soften=False)
            for n, k in enumerate(sorted(rates))
        ]
        panels.append(Panel(f"pass@k: {label}", "share of prompts", _present(curves)))
    return panels


def _panel(lines: Lines, title: str, unit: str, plotted: Sequence[tuple[str, str]]) -> Panel:
    soften, dots = title not in _AS_IT_IS, title in _DOTS
    written = set(itertools.chain.from_iterable(lines))
    names = [(label, name) for label, name in plotted if name in written]
    curves = [
        _curve(lines, name, label, n, soften=soften, dots=dots)
        for n, (label, name) in enumerate(names)
    ]
    return Panel(title, unit, _present(curves))


def _curve(
    lines: Lines,
    name: str,
    label: str,
    colour: int,
    *,
    dots: bool = False,
    soften: bool = True,
    run: int = 0,
) -> Curve:
    lost = not_finite(lines, name)
    return Curve(label, points(lines, name), colour, dots, soften, lost, run)


def _present(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """Curves that have a value, finite or not."""
    return tuple(curve for curve in curves if curve.points or curve.lost)
