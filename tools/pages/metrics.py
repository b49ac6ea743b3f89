"""docs/metrics.md: the metrics of ``metrics.jsonl`` by area, with unit and meaning.

Input: the declarations of ``rlpost.observe.metric_names``, and the names of other stacks in
``metric_names.txt``. Output: the text of the page.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.observe.metric_names import METRICS

_AREAS = {
    "reward": "Rewards of the rollout, before any penalty. A response counts once here, in rollout and in eval, "
    "however many samples (turns, branches, compactions) it has. Over prompts: the mean over prompts of the mean "
    "over their responses.",
    "rollout": "Responses of the rollout, and the prompts and groups dropped or held on the way to training.",
    "env": "Episodes, with --env (docs/agents.md).",
    "train": "The last optimizer step of the rollout: means over all trained tokens of all ranks.",
    "eval": "Evaluation on held-out prompts, by set.",
    "time": "Wall-clock times measured by the driver, and rates derived from them.",
    "perf": "Compute efficiency of the trainer.",
    "sync": "The latest weight update of the engines.",
    "checkpoint": "Checkpoints saved since the previous line.",
    "driver": "The driver's own process.",
    "engines": "Requests to engines: to those of the policy, and to groups (docs/engines.md).",
    "memory": "Memory at the end of the step; maximum over actors or engines. 1 GB is 10^9 bytes.",
    "run": "The run as a whole.",
}


_OTHERS = """
## Names of other stacks

The same curves in slime (624b824, 21 Aug 2026), NeMo-RL (7ea279a, 22 Aug 2026) and verl (b178a3c, 29 Jan 2026), from
their sources. "~" marks another definition: compare the trend, not the value. An empty cell is a name that was not
found at that commit.

| rlpost | slime | NeMo-RL | verl |
|---|---|---|---|
"""


def names_of_others() -> list[list[str]]:
    """Return rows of names: of rlpost, slime, NeMo-RL and verl."""
    lines = Path(__file__).with_name("metric_names.txt").read_text().splitlines()
    return [
        [cell.strip() for cell in line.split("|")] for line in lines if not line.startswith("#")
    ]


def metrics_page() -> str:
    """All metrics as a Markdown page."""
    lines = [
        "# Metrics",
        "",
        "<!-- Written by tools/make_docs.py from rlpost/observe/metric_names.py; change it there. -->",
        "",
        "`RUN/metrics.jsonl` has one line per step: the step and those of the metrics below that apply to the run.",
        "Step 0 is the evaluation before training. Each step appears once and in order, also after restarts: a resume",
        "first truncates the lines after the step that it resumes from. W&B receives the same metrics under the same",
        "names. `rlpost report` and `rlpost compare RUN RUN` plot them; see [seeing.md](seeing.md).",
    ]
    for area, text in _AREAS.items():
        lines += ["", f"## {area}", "", text, "", "| name | unit | |", "|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in METRICS if m.area == area]
    others = [f"| {' | '.join(cells)} |" for cells in names_of_others()]
    return "\n".join(lines) + "\n" + _OTHERS + "\n".join(others) + "\n"
