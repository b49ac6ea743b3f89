"""Names of metrics: every one that the code writes is declared, and the page says what the
declarations say.
"""

import re
from collections import Counter
from pathlib import Path

import torch

from rlpost.algorithm.objective import Tokens, policy_objective, sft_objective
from rlpost.driver.batches import rollout_metrics, staleness_metrics
from rlpost.observe.metric_names import METRICS, declared
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.evaluate import pass_rates, summarise
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, ScoredSample
from tests.metric_names import undeclared
from tests.settings import loss_settings
from tools.pages.metrics import metrics_page

ROOT = Path(__file__).parents[3]
UNITS = {"s": "s", "tokens_per_s": "tokens/s", "frac": "share"}


def test_every_name_is_declared_once_under_an_area():
    assert [
        name for name, count in Counter(metric.name for metric in METRICS).items() if count > 1
    ] == []
    assert all(
        re.fullmatch(
            r"(reward|rollout|env(/LABEL)?|train|eval/SET(/env/LABEL)?|time|perf|sync|checkpoint|driver|engines(/GROUP)?|memory"
            r"|run)/[a-z0-9_]+(@K)?",
            metric.name,
        )
        for metric in METRICS
    )


def test_a_unit_at_the_end_of_a_name_is_its_unit():
    for metric in METRICS:
        for ending, unit in UNITS.items():
            if metric.name.endswith(("_" + ending, "/" + ending)) and not metric.name.endswith(
                "tokens_per_s"
            ):
                assert metric.unit == unit, metric


def test_a_name_is_known_with_the_name_of_its_set_and_a_plugins_is_not():
    assert declared("eval/aime-2024/pass@16").name == "eval/SET/pass@K"
    assert declared("train/routing_diff_frac@12").name == "train/routing_diff_frac@K"
    assert declared("eval/a/b/reward_mean") is None
    assert undeclared({"step", "reward/mean", "train/my_own", "rewardXmean"}) == [
        "rewardXmean",
        "train/my_own",
    ]


def test_literal_names_in_the_code_are_declared():
    """Every word of the form area/name in the trainer's source."""
    found = set()
    for path in (ROOT / "rlpost").rglob("*.py"):
        if path.name != "metric_names.py":
            found |= set(
                re.findall(
                    r'"((?:reward|rollout|train|time|perf|sync|checkpoint|driver|memory|run)/[a-z0-9_]+)"',
                    path.read_text(),
                )
            )
    assert len(found) > 25
    assert undeclared(found) == []


def test_names_that_are_put_together_are_declared():
    samples = tuple(
        ScoredSample(Sample(0, n, (1,), (2, 3), (-0.1, -0.2), "x", "stop", 0), float(n))
        for n in range(2)
    )
    groups = [SampleGroup(0, samples)]
    names = {f"eval/a/{name}" for name in summarise(groups) | pass_rates(groups)}
    names |= rollout_metrics(groups).keys() | staleness_metrics(groups, 1).keys()
    one = torch.ones(2)
    tokens = Tokens(-one, one, -one, -one, -one, one, one, 2 * one, lambda value: 2 * value)
    settings = loss_settings(use_tis=True, use_kl_loss=True)
    names |= {
        f"train/{name}"
        for name in policy_objective(tokens, settings)[1] | sft_objective(tokens, settings)[1]
    }
    buffer = RolloutBuffer(Rules(batch_size=1, start_size=1, num_steps=1), Backlog(), step=0)
    buffer.add_prompts([Prompt(0, "x", (1,))])
    buffer.replay(groups[0])
    buffer.take()
    assert len(buffer.counts()) > 4
    names |= buffer.counts().keys()
    assert len(names) > 30
    assert undeclared(names) == []


def test_the_page_is_what_the_declarations_say():
    assert (ROOT / "docs/metrics.md").read_text() == metrics_page(), (
        "docs/metrics.md is old; run make docs"
    )
