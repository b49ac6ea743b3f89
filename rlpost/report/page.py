"""The report of one run as a page. Pure: facts in, HTML text out.

Invariants: the page is one file and asks the network for nothing; whatever comes from the run is escaped; the browser
is told to run this page's own script alone, so that no answer of a model can bring one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.metrics.writer import eval_rewards
from rlpost.report.html import Cell, card, document, filter_tools, key, raw, section, table, text
from rlpost.report.panels import Panel, panels
from rlpost.report.run_facts import RunFacts
from rlpost.report.series import seconds, short
from rlpost.report.svg import NUM_COLOURS, line_plot, stacked_plot
from rlpost.report.timeline import COMES_BACK, Attempt, Doing, Timeline, timeline

_LEVELS = {"OK": "good", "WARN": "warn", "EXCLUDE_NODE": "bad", "FATAL_CONFIG": "bad"}
_DOING: dict[Doing, str] = {
    "waiting": "in the queue",
    "starting": "starting",
    "training": "training",
    "ending": "giving way",
}
_MARKS = {"committed": "checkpoint", "preempted": "preemption", "failed": "failure", "done": "done"}
PACE_STEPS = 20
SHOWN_ANSWERS = 8


def report_page(facts: RunFacts) -> str:
    """The whole page."""
    told = timeline(facts.events, facts.written)
    sections = [
        section("time", "Time", _time(told)) if told else "",
        section("plots", "Plots", plots(panels(facts.lines), resumed_steps(told))) if facts.lines else "",
        section("samples", "Answers", _answers(facts.samples)),
        section("recipe", "Recipe", _recipe(facts)),
        section("hosts", "Network and preflight", _hosts(facts)),
        section("resume", "Go on", _go_on(facts)),
    ]
    links = [("time", "Time"), ("plots", "Plots"), ("samples", "Answers"), ("recipe", "Recipe")]
    links += [("hosts", "Network and preflight"), ("resume", "Go on")]
    there = [(name, words) for name, words in links if any(f'id="{name}"' in part for part in sections)]
    return document(facts.name, [_header(facts, told), _nav(there), _tiles(facts, told), *sections])


def resumed_steps(told: Timeline | None) -> list[float]:
    """The steps after which a later attempt went on."""
    attempts = told.attempts[1:] if told else ()
    return sorted({float(one.first_step) for one in attempts if one.first_step})


def plots(found: Sequence[Panel], resumed: Sequence[float] = ()) -> str:
    """Panels as cards."""
    cards = []
    for panel in found:
        draw = stacked_plot if panel.is_stacked else line_plot
        names = [(curve.label, f"c{curve.colour % NUM_COLOURS}") for curve in panel.curves]
        head = f'<div class="head"><h3>{text(panel.title)}</h3><span>{text(panel.unit)}</span></div>'
        says_it_all = len(names) == 1 and names[0][0] == panel.title.lower()
        picture = draw(panel.curves, title=panel.title, resumed=resumed)
        cards.append(card(head + key([] if says_it_all else names) + picture))
    return f'<div class="plots">{"".join(cards)}</div>'


def key_figures(lines: Sequence[Mapping[str, float]], num_steps: Any) -> list[tuple[str, str]]:
    """What a run came to, in a few numbers: (value, name); its pace is that of the last PACE_STEPS steps."""
    if not lines:
        return [("0" + (f" / {num_steps}" if num_steps else ""), "steps")]
    newest = lines[-1]
    found = [(f"{newest['step']:.0f}" + (f" / {num_steps}" if num_steps else ""), "steps")]
    if "reward/mean" in newest:
        found.append((f"{newest['reward/mean']:.3f}", "reward, last step"))
    for name in sorted({name for line in lines for name in eval_rewards(line)}):
        values = [line[name] for line in lines if name in line]
        found.append((f"{values[0]:.3f} → {values[-1]:.3f}", f"reward on {name.split('/')[1]}"))
    for name, words, unit in (("time/tokens_per_s", "throughput", " tok/s"), ("time/step_s", "a step", " s")):
        last = [line[name] for line in lines[-PACE_STEPS:] if name in line]
        if last:
            found.append((short(sum(last) / len(last)) + unit, words))
    return found


def _state(facts: RunFacts, told: Timeline | None) -> tuple[str, str]:
    """Words and class for how the run stands as far as its folder tells."""
    if told is None:
        return "not started", "soft"
    if [entry["event"] for entry in facts.events if entry["event"] != "verdict"][-1:] == ["done"]:
        return "done", "good"
    newest = facts.events[-1]
    if newest["event"] == "verdict":
        comes_back = newest.get("answer") in COMES_BACK
        return ("coming back", "warn") if comes_back else (str(newest.get("verdict")), "bad")
    doing = told.spans[-1].doing if told.spans else "waiting"
    return _DOING[doing], "good" if doing == "training" else "warn"


def _header(facts: RunFacts, told: Timeline | None) -> str:
    words, kind = _state(facts, told)
    when = facts.written.strftime("%Y-%m-%d %H:%M UTC")
    return (
        f'<header><h1>{text(facts.name)}</h1><span class="badge {kind}">{text(words)}</span>'
        f'<span class="soft">as of {when}</span><span class="soft path">{text(facts.folder)}</span></header>'
    )


def _nav(links: Sequence[tuple[str, str]]) -> str:
    # No addresses: the one of this page keeps the filters.
    return "<nav>" + "".join(f'<a href="#{name}">{words}</a>' for name, words in links) + "</nav>"


def _tiles(facts: RunFacts, told: Timeline | None) -> str:
    tiles = key_figures(facts.lines, facts.setting("rollout.num_rollout"))
    if told is not None:
        tiles.append((seconds(round(told.end_s)), "since submission"))
        attempts = "attempt" if len(told.attempts) == 1 else "attempts"
        tiles.append((str(len(told.attempts)), f"{attempts}, {told.num_preemptions} preempted"))
    shown = (f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{"".join(shown)}</div>'


def _time(told: Timeline) -> str:
    spent: list[tuple[str, str]] = [
        (f"{words} {seconds(round(told.spent_s(doing)))}", doing)
        for doing, words in _DOING.items()
        if told.spent_s(doing)
    ]
    spent += [(words, kind) for kind, words in _MARKS.items() if any(mark.kind == kind for mark in told.marks)]
    rows = [_attempt_row(one) for one in told.attempts]
    columns = ("attempt", "began (UTC)", "nodes", "ready after", "from step", "saved", "lasted", "end")
    return card(key(spent) + time_bar(told) + f'<div class="scroll">{table(columns, rows)}</div>')


def time_bar(told: Timeline) -> str:
    """What the run did, from the first entry of its ledger to the last: spans, checkpoints below, all else above."""
    whole = told.end_s or 1.0
    parts = []
    for span in told.spans:
        of = f"attempt {span.attempt}: " if span.attempt is not None else ""
        words = f"{of}{_DOING[span.doing]}, {seconds(round(span.end_s - span.begin_s))}"
        place = f"left:{span.begin_s / whole:.4%};width:{(span.end_s - span.begin_s) / whole:.4%}"
        parts.append(f'<i class="span {span.doing}" style="{place}" title="{text(words)}"></i>')
    for mark in told.marks:
        place = f"left:{min(1.0, mark.at_s / whole):.4%}"
        parts.append(f'<i class="mark {mark.kind}" style="{place}" title="{text(mark.text)}"></i>')
    scale = "".join(f"<span>{seconds(round(whole * n / 4))}</span>" for n in range(5))
    label = "what the run did with its time"
    return f'<div class="bar" role="img" aria-label="{label}">{"".join(parts)}</div><div class="scale">{scale}</div>'


def _attempt_row(one: Attempt) -> list[Cell]:
    startup = "" if one.startup_s is None else seconds(round(one.startup_s))
    first, saved = ("" if step is None else str(step) for step in (one.first_step, one.last_saved))
    began = one.began.strftime("%Y-%m-%d %H:%M:%S")
    return [
        one.name,
        began,
        one.nodes,
        startup,
        first,
        saved,
        seconds(round(one.lasted_s)),
        (one.ended or "under way", "wide"),
    ]


def _answers(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return '<p class="soft">No answer is kept yet.</p>'
    options = [("", "any reward"), ("best", "best of its group"), ("worst", "worst of its group")]
    best: dict[tuple[Any, Any], float] = {}
    for sample in samples:
        best[_group(sample)] = max(sample["reward"], best.get(_group(sample), sample["reward"]))
    shown = "".join(_sample(sample, is_best=sample["reward"] == best[_group(sample)]) for sample in samples)
    tools = filter_tools("answers", "search prompts, answers, labels, steps", options=options, at_most=SHOWN_ANSWERS)
    return f'{tools}<div id="answers">{shown}</div>'


def _group(sample: Mapping[str, Any]) -> tuple[Any, Any]:
    return sample.get("step"), sample.get("prompt_id")


def _sample(sample: Mapping[str, Any], *, is_best: bool) -> str:
    reward = float(sample["reward"])
    facts = [f"<b>step {text(sample['step'])}</b>"]
    facts.append(f'<b class="{"good" if is_best else "bad"}">reward {short(reward)}</b>')
    facts.append(f"prompt {text(sample.get('prompt_id', ''))}")
    facts.append(f"{text(sample.get('num_tokens', ''))} tokens")
    if sample.get("finish") == "length":
        facts.append('<span class="warn">cut off by the length limit</span>')
    if sample.get("label") is not None:
        facts.append(f"label {text(sample['label'])}")
    prompt = f'<pre class="prompt">{text(sample["prompt"])}</pre>' if sample.get("prompt") else ""
    head = f'<div class="head">{"".join(f"<span>{fact}</span>" for fact in facts)}</div>'
    kind = "best" if is_best else "worst"
    answer = f"<pre>{text(sample.get('answer', ''))}</pre>"
    return f'<div class="card sample" data-row data-kind="{kind}">{head}{prompt}{answer}</div>'


def _recipe(facts: RunFacts) -> str:
    if not facts.settings:
        return '<p class="soft">run.json cannot be read.</p>'
    rows = []
    for one in facts.settings:
        mark = ' data-differs class="differs"' if one.differs else ""
        cells = (one.key, one.value, one.default)
        rows.append(
            f"<tr data-row{mark}>" + "".join(f'<td class="wide"><code>{text(c)}</code></td>' for c in cells) + "</tr>"
        )
    tools = filter_tools("settings", "search settings", checkbox="also what has its default")
    code = f'<p class="soft path">code {text(facts.code)}</p>' if facts.code else ""
    head = "<thead><tr><th>setting</th><th>value</th><th>default</th></tr></thead>"
    body = f'<tbody id="settings">{"".join(rows)}</tbody>'
    return code + tools + card(f'<div class="scroll"><table>{head}{body}</table></div>')


def _hosts(facts: RunFacts) -> str:
    parts = []
    for host, words in (facts.network or {}).items():
        if words:
            parts.append(f"<details><summary>network of {text(host)}</summary><pre>{text(words)}</pre></details>")
    rows: list[list[Cell]] = [
        [one.attempt, one.host, one.name, (one.level, _LEVELS.get(one.level, "")), (one.found, "wide")]
        for one in sorted(facts.checks, key=lambda one: (-_rank(one.level), -int(one.attempt)))
    ]
    if rows:
        columns = ("attempt", "host", "check", "level", "found")
        attributes = ["data-row" + (" data-differs" if row[3][0] != "OK" else "") for row in rows]
        shown = table(columns, rows, body="checks", attributes=attributes)
        tools = filter_tools("checks", "search hosts and checks", checkbox="also what is as it should be")
        parts.append(tools + card(f'<div class="scroll">{shown}</div>'))
    return "".join(parts) or '<p class="soft">No attempt has looked at its hosts yet.</p>'


def _rank(level: str) -> int:
    return list(_LEVELS).index(level) if level in _LEVELS else len(_LEVELS)


def _go_on(facts: RunFacts) -> str:
    folder = shlex.quote(facts.folder)
    committed = next((entry for entry in reversed(facts.events) if entry["event"] == "committed"), None)
    where = "No checkpoint is committed yet; the run begins anew."
    if committed is not None:
        where = f"The newest checkpoint is {committed.get('checkpoint')}, step {committed.get('step')}."
    steps = facts.setting("rollout.num_rollout")
    more = f"--num-rollout {2 * steps}" if isinstance(steps, int) else "--num-rollout N"
    again = f"rlpost submit {folder}/report/recipe.toml --resume --run-folder {folder}"
    commands = (
        f"# look at it\nrlpost status {folder} --watch\n"
        f"# while its job runs: save, requeue and go on\nrlpost requeue {folder}\n"
        f"# a new job for the same run, and one that trains longer\n{again}\n{again} {more}"
    )
    intro = "A run that is preempted or fails comes back by itself, within the budgets of its recipe."
    return f"<p>{text(where)} {intro} By hand:</p>{raw('pre', commands)}"
