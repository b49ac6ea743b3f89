"""The report of one run as a page. Pure: facts in, HTML text out (``templates/run.html``)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.ledger import Entry
from common.units import counted, duration_text
from rlpost.extensions.watching.pace import STEP_S, recent
from rlpost.extensions.watching.report.episodes import chosen, summary
from rlpost.extensions.watching.report.html import curve_points, render
from rlpost.extensions.watching.report.images import MAX_OF_ANSWER, digests_of
from rlpost.extensions.watching.report.panels import drawn_names, other_panels, panels
from rlpost.extensions.watching.report.run_facts import HostCheck, RunFacts
from rlpost.extensions.watching.series import short
from rlpost.extensions.watching.timeline import (
    COMES_BACK,
    Attempt,
    Doing,
    Mark,
    Span,
    Timeline,
    hours_of_steps,
    timeline,
)
from rlpost.observe.samples import RecordedAnswer
from rlpost.observe.writer import eval_rewards

_LEVELS = {"OK": "good", "WARN": "warn", "EXCLUDE_NODE": "bad", "FATAL_CONFIG": "bad"}
_ACTIVITIES: dict[Doing, str] = {
    "waiting": "in the queue",
    "starting": "starting",
    "training": "training",
    "ending": "stopping",
}
_MARKS = {
    "committed": "checkpoint",
    "preempted": "preemption",
    "failed": "failure",
    "recovered": "recovery within an attempt",
    "done": "done",
}
_ANSWER_OPTIONS = (
    ("", "any reward"),
    ("best", "best of its group"),
    ("worst", "worst of its group"),
)
_EPISODE_OPTIONS = (("", "any outcome"), ("scored", "scored"), ("failed", "failed or timed out"))
MAX_EPISODES = 60  # conversations on the page
MAX_FIXED = 6  # prompts that are followed over time


@dataclass(frozen=True, slots=True)
class _BarPart:
    """A span or a mark of the time bar: CSS classes, CSS position, tooltip."""

    kind: str
    place: str
    text: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """A recorded sample, and whether no answer of its group had a higher reward."""

    sample: RecordedAnswer
    is_best: bool

    @property
    def images(self) -> list[str]:
        return digests_of(self.sample)


@dataclass(frozen=True, slots=True)
class _Followed:
    """A prompt that was answered at several steps, with its answers in order of the steps."""

    prompt: str
    of: str
    answers: tuple[RecordedAnswer, ...]

    @property
    def images(self) -> list[str]:
        return digests_of(self.answers[0])


def report_page(facts: RunFacts) -> str:
    """Return the whole page."""
    history = timeline(facts.events, facts.written)
    folder = shlex.quote(facts.folder)
    steps = facts.num_steps
    main = panels(facts.lines)
    others = other_panels([(facts.name, facts.lines)], drawn_names(facts.lines))
    return render(
        "run.html",
        title=facts.name,
        facts=facts,
        most_images=MAX_OF_ANSWER,
        history=history,
        spent=facts.goodput,
        state=_state(facts, history),
        tiles=_tiles(facts, history),
        activities=_activities(history) if history else (),
        bar=_bar_parts(history) if history else (),
        causes=by_cause(history.attempts) if history else (),
        is_grouped=history is not None and len(history.attempts) >= GROUPED_FROM,
        panels=main,
        others=others,
        num_points=curve_points(main, *(group.panels for group in others)),
        hours=[hours_of_steps(facts.events, facts.lines)],
        marks={"resume": resumed_steps(history), "saved": committed_steps(facts.events)},
        followed=_followed(facts.samples, facts.fixed),
        answers=_answers(facts.samples),
        answer_options=_ANSWER_OPTIONS,
        environments=summary(facts.episodes),
        episodes=chosen(facts.episodes, most=MAX_EPISODES),
        episode_options=_EPISODE_OPTIONS,
        checks=sorted(facts.checks, key=_worst_first),
        levels=_LEVELS,
        committed=next(
            (entry for entry in reversed(facts.events) if entry["event"] == "committed"), None
        ),
        folder=folder,
        submit=f"rlpost submit {folder}/report/recipe.toml --resume --run-folder {folder}",
        longer=f"--num-rollout {2 * steps}" if isinstance(steps, int) else "--num-rollout N",
    )


def resumed_steps(history: Timeline | None) -> list[float]:
    """Return the steps at which a later attempt resumed."""
    attempts = history.attempts[1:] if history else ()
    return sorted({float(attempt.first_step) for attempt in attempts if attempt.first_step})


def key_figures(lines: Sequence[Mapping[str, float]], num_steps: object) -> list[tuple[str, str]]:
    """Return the main figures of a run as (value, name), by ``rlpost.extensions.watching.pace``."""
    goal = f" / {num_steps}" if num_steps else ""
    if not lines:
        return [(f"0{goal}", "steps")]
    newest = lines[-1]
    figures = [(f"{newest['step']:.0f}{goal}", "steps")]
    if "reward/mean" in newest:
        figures.append((f"{newest['reward/mean']:.3f}", "reward, last step"))
    for name in eval_rewards(*lines):
        values = [line[name] for line in lines if name in line]
        figures.append((f"{values[0]:.3f} → {values[-1]:.3f}", f"reward on {name.split('/')[1]}"))
    for name, words, unit in (
        ("time/tokens_per_s", "throughput", " tok/s"),
        ("time/step_s", "a step", " s"),
    ):
        value = recent(lines, name)
        if value is not None:
            figures.append((short(value) + unit, words))
    return figures


def _state(facts: RunFacts, history: Timeline | None) -> tuple[str, str]:
    """Return the state of the run as its folder shows it, and the CSS class of the badge."""
    if history is None:
        return "not started", "soft"
    if [entry["event"] for entry in facts.events if entry["event"] != "verdict"][-1:] == ["done"]:
        return "done", "good"
    newest = facts.events[-1]
    if newest["event"] == "cancelled":
        return "cancelled", "bad"
    if newest["event"] == "verdict":
        is_requeued = newest.get("answer") in COMES_BACK
        return ("requeued", "warn") if is_requeued else (str(newest.get("verdict")), "bad")
    doing = history.spans[-1].doing if history.spans else "waiting"
    return _ACTIVITIES[doing], "good" if doing == "training" else "warn"


def _tiles(facts: RunFacts, history: Timeline | None) -> list[tuple[str, str]]:
    steps = facts.num_steps
    tiles = key_figures(facts.lines, steps)
    pace = recent(facts.lines, STEP_S)
    if history is not None and isinstance(steps, int) and pace is not None:
        left = steps - int(facts.lines[-1]["step"])
        if left > 0 and history.spans and _state(facts, history)[1] != "bad":
            tiles.append((duration_text(round(left * pace)), f"left at {short(pace)} s a step"))
    if (spent := facts.goodput) is not None:
        tiles.append((f"{spent.trained_frac:.0%}", "goodput"))
        tiles.append((f"{spent.gpu_hours:,.1f}", "GPU hours"))
        if spent.cost is not None:
            tiles.append((f"{spent.cost:,.2f}", "cost"))
    if history is not None:
        tiles.append((str(steps_lost(facts.events)), "steps lost and trained again"))
        tiles.append((duration_text(round(history.end_s)), "since submission"))
        number, _, attempts = counted(len(history.attempts), "attempt").partition(" ")
        tiles.append((number, f"{attempts}, {history.num_preemptions} preempted"))
    return tiles


def _activities(history: Timeline) -> list[tuple[str, str]]:
    """Return the legend of the time bar: what took time, with its total, and the kinds of marks."""
    spent = [
        (f"{words} {duration_text(round(history.spent_s(doing)))}", str(doing))
        for doing, words in _ACTIVITIES.items()
        if history.spent_s(doing)
    ]
    kinds = {mark.kind for mark in history.marks}
    return spent + [(words, kind) for kind, words in _MARKS.items() if kind in kinds]


def _bar_parts(history: Timeline) -> list[_BarPart]:
    """Return what the time bar shows, from the first entry of the ledger to the last."""
    whole = history.end_s or 1.0
    parts = []
    for span in bar_spans(history):
        attempt = f"attempt {span.attempt}: " if span.attempt is not None else ""
        words = (
            f"{attempt}{_ACTIVITIES[span.doing]}, {duration_text(round(span.end_s - span.begin_s))}"
        )
        place = f"left:{span.begin_s / whole:.4%};width:{(span.end_s - span.begin_s) / whole:.4%}"
        parts.append(_BarPart(f"span {span.doing}", place, words))
    for mark in bar_marks(history):
        parts.append(
            _BarPart(f"mark {mark.kind}", f"left:{min(1.0, mark.at_s / whole):.4%}", mark.text)
        )
    return parts


def _answers(samples: Sequence[RecordedAnswer]) -> list[_Answer]:
    best: dict[tuple[object, object], float] = {}
    for sample in samples:
        best[_group(sample)] = max(sample["reward"], best.get(_group(sample), sample["reward"]))
    return [_Answer(sample, sample["reward"] == best[_group(sample)]) for sample in samples]


def _followed(
    samples: Sequence[RecordedAnswer], fixed: Sequence[RecordedAnswer]
) -> list[_Followed]:
    """Return prompts answered at several steps: of evaluations first, then of the rollout."""
    by_prompt: dict[tuple[str, str, tuple[str, ...]], dict[int, RecordedAnswer]] = {}
    for sample in (*fixed, *reversed(samples)):
        if sample.get("prompt"):
            of = str(sample.get("set") or "rollout")
            key = (of, str(sample["prompt"]), tuple(digests_of(sample)))
            by_prompt.setdefault(key, {}).setdefault(sample["step"], sample)
    followed = []
    for (of, prompt, _), answers in by_prompt.items():
        if len(answers) > 1:
            in_order = tuple(answers[step] for step in sorted(answers))
            followed.append(_Followed(prompt, of, in_order))
    return followed[:MAX_FIXED]


def _group(sample: RecordedAnswer) -> tuple[object, object]:
    return sample.get("step"), sample.get("prompt_id")


def _worst_first(check: HostCheck) -> tuple[int, int]:
    levels = list(_LEVELS)
    rank = levels.index(check.level) if check.level in levels else len(levels)
    return -rank, -int(check.attempt)


GROUPED_FROM = 12
"""Attempts; fewer are shown as they are."""
MAX_PARTS = 300
"""Spans of the time bar, and marks of one kind, that are drawn one by one."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MAX_CAUSE = 300  # characters


@dataclass(frozen=True, slots=True)
class Cause:
    """Attempts that ended alike.

    Attributes:
        text: how the newest of them ended.
        names: their names, in order.
        lasted_s: their total time.
        never_ready: those that did not get to the first step.
    """

    text: str
    names: tuple[str, ...]
    lasted_s: float
    never_ready: int

    @property
    def range(self) -> str:
        """The first and the last name.

        >>> Cause("done", ("3", "8", "9"), 1.0, 0).range
        '3 to 9'
        """
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]}"


def by_cause(attempts: Sequence[Attempt]) -> list[Cause]:
    """Group attempts whose ends differ in numbers at most, the most frequent first."""
    groups: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        groups.setdefault(_NUMBER.sub("0", attempt.ended)[:_MAX_CAUSE], []).append(attempt)
    return sorted(map(_cause, groups.values()), key=lambda cause: -len(cause.names))


def _cause(group: Sequence[Attempt]) -> Cause:
    return Cause(
        group[-1].ended or "running",
        tuple(attempt.name for attempt in group),
        sum(attempt.lasted_s for attempt in group),
        sum(attempt.startup_s is None for attempt in group),
    )


def steps_lost(events: Sequence[Entry]) -> int:
    """Return the steps that were trained and had to be trained again, over all attempts."""
    lost = 0
    for entry in events:
        if entry["event"] == "started":
            lost += int((entry.get("again") or {}).get("steps", 0))
        elif entry["event"] == "recovered":
            lost += int(entry.get("steps_again") or 0)
    return lost


def committed_steps(events: Sequence[Entry]) -> list[float]:
    """Return the steps of the checkpoints, ascending, each once."""
    found = {entry.get("step") for entry in events if entry["event"] == "committed"}
    return sorted(float(step) for step in found if isinstance(step, int))


def bar_spans(history: Timeline) -> list[Span]:
    """Return the spans of the time bar.

    Beyond MAX_PARTS they are MAX_PARTS equal parts of the time, each with the activity that took
    most of it; equal neighbours are one.
    """
    if len(history.spans) <= MAX_PARTS:
        return list(history.spans)
    width = history.end_s / MAX_PARTS
    shares: list[dict[Doing, float]] = [{} for _ in range(MAX_PARTS)]
    for span in history.spans:
        first = min(MAX_PARTS - 1, int(span.begin_s / width))
        last = min(MAX_PARTS - 1, int(span.end_s / width))
        for part in range(first, last + 1):
            inside = min(span.end_s, (part + 1) * width) - max(span.begin_s, part * width)
            if inside > 0:
                shares[part][span.doing] = shares[part].get(span.doing, 0.0) + inside
    spans: list[Span] = []
    for part, share in enumerate(shares):
        if not share:
            continue
        doing, end_s = max(share, key=lambda one: share[one]), (part + 1) * width
        # joined to the span before if no empty part is between them; 1e-6 s of rounding
        if spans and spans[-1].doing == doing and spans[-1].end_s >= part * width - 1e-6:
            spans[-1] = Span(doing, spans[-1].begin_s, end_s, None)
        else:
            spans.append(Span(doing, part * width, end_s, None))
    return spans


def bar_marks(history: Timeline) -> list[Mark]:
    """Return the marks of the time bar; those of a kind that would touch are one, with a count."""
    gap = history.end_s / MAX_PARTS
    by_kind: dict[str, list[list[Mark]]] = {}
    for mark in history.marks:
        clusters = by_kind.setdefault(mark.kind, [])
        if clusters and mark.at_s - clusters[-1][0].at_s < gap:
            clusters[-1].append(mark)
        else:
            clusters.append([mark])
    marks = []
    for clusters in by_kind.values():
        for first, *others in clusters:
            text = f"{len(others) + 1} times, the first: {first.text}" if others else first.text
            marks.append(Mark(first.kind, first.at_s, text))
    return sorted(marks, key=lambda mark: mark.at_s)
