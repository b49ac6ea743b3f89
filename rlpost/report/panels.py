"""The plots of a report and their curves. Pure.

Input: the lines of ``metrics.jsonl`` of one run or of several. Output: the panels that have data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlpost.metrics.writer import eval_rewards
from rlpost.report.series import points
from rlpost.report.svg import Curve

Lines = Sequence[Mapping[str, float]]

PHASES = (
    ("generate", "time/generate_s"),
    ("train", "time/train_s"),
    ("sync", "time/sync_s"),
    ("evaluate", "time/eval_s"),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    is_stacked: bool = False


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
        (("cut off", "rollout/truncated_frac"), ("repetitive", "rollout/repetitive_frac")),
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
    """Return the plots of one run, reward first."""
    found = [_reward(lines)]
    found += [_panel(lines, *plot) for plot in _PLOTS]
    trained = [line for line in lines if "time/step_s" in line]
    phases = [Curve(label, points(trained, name), n) for n, (label, name) in enumerate(PHASES)]
    found.insert(
        -1,
        Panel(
            "Phases of a step",
            "s",
            tuple(curve for curve in phases if curve.points),
            is_stacked=True,
        ),
    )
    return [panel for panel in found if panel.curves]


def compared_panels(runs: Sequence[tuple[str, Lines]]) -> list[Panel]:
    """Return plots of several runs: of each panel the first metric that any run has."""
    wanted = [("Reward of the rollout", "mean", "reward/mean")]
    evals = sorted({name for _, lines in runs for line in lines for name in eval_rewards(line)})
    wanted += [(f"Evaluation: {name.split('/')[1]}", "mean reward", name) for name in evals]
    for title, unit, plotted in _PLOTS:
        there = [
            name for _, name in plotted if any(name in line for _, lines in runs for line in lines)
        ]
        wanted += [(title, unit, there[0])] if there else []
    wanted += [("Time of a step", "s", "time/step_s")]
    wanted += [(f"Time: {label}", "s", name) for label, name in PHASES]
    found = []
    for title, unit, name in wanted:
        of_runs = [(label, points(lines, name), n) for n, (label, lines) in enumerate(runs)]
        dots, soften = name.startswith("eval/") or title in _DOTS, title not in _AS_IT_IS
        curves = tuple(
            Curve(label, own, n, dots=dots, soften=soften) for label, own, n in of_runs if own
        )
        found.append(Panel(title, f"{name}, {unit}" if unit else name, curves))
    return [panel for panel in found if panel.curves]


def _reward(lines: Lines) -> Panel:
    evals = sorted({name for line in lines for name in eval_rewards(line)})
    curves = [Curve("rollout, mean", points(lines, "reward/mean"), 0)]
    curves += [
        Curve(name.split("/")[1], points(lines, name), n, dots=True, soften=False)
        for n, name in enumerate(evals, 1)
    ]
    return Panel("Reward", "mean", tuple(curve for curve in curves if curve.points))


def _panel(lines: Lines, title: str, unit: str, plotted: Sequence[tuple[str, str]]) -> Panel:
    there = [(label, own) for label, name in plotted if (own := points(lines, name))]
    soften, dots = title not in _AS_IT_IS, title in _DOTS
    curves = tuple(
        Curve(label, own, n, soften=soften, dots=dots) for n, (label, own) in enumerate(there)
    )
    return Panel(title, unit, curves)


def mean_phases(lines: Lines) -> dict[str, float]:
    """Return mean seconds per step of each phase that took time; evaluations are spread over all
    steps.
    """
    trained = [line for line in lines if "time/step_s" in line]
    sums = {label: sum(line.get(name, 0.0) for line in trained) for label, name in PHASES}
    return (
        {label: total / len(trained) for label, total in sums.items() if total} if trained else {}
    )
