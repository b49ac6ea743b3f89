"""The rollout of a whole run on this machine, with real engines, trainer and checkpoints.

Weights are sent from shard to shard.

One run combines fully asynchronous generation, a filter that drops groups, partial rollouts, tool
calls within answers, evaluation sets with separate settings on one of the two engines while the next
steps train, and the death of a trainer rank and of that engine. Filter, tool and reward are functions
written for slime.
"""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from rlpost.durable.commit import PREFIX
from rlpost.durable.recorded import read_groups
from rlpost.durable.state import RunState
from rlpost.observe.writer import read_metrics
from rlpost.rollout.examples.calculator import result
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ROOT

NUM_STEPS, EVALUATED_EVERY = 8, 4
BATCH, SAMPLES = 8, 8


@pytest.fixture(scope="module")
def run(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run. Its prompts end before the "=", so that the calculator finds a sum
    when it is called.
    """
    folder = tmp_path_factory.mktemp("rollout of 50 per cent")
    lines = [json.loads(line) for line in (assets / "train.jsonl").read_text().splitlines()]
    rows = [{**line, "prompt": line["prompt"].removesuffix("=")} for line in lines]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    heldout = f"{assets}/heldout.jsonl@[0:50]"
    (folder / "sets.toml").write_text(
        '[defaults]\ncustom_generate_function_path = "rlpost.rollout.examples.calculator.generate"\n'
        f'[[datasets]]\nname = "greedy"\npath = "{heldout}"\ntemperature = 0.0\n'
        f'[[datasets]]\nname = "drawn"\npath = "{heldout}"\nn_samples_per_eval_prompt = 4\ntemperature = 1.0\n'
    )
    settings = (
        *("--num-rollout", f"{NUM_STEPS}", "--rollout-batch-size", f"{BATCH}"),
        *("--n-samples-per-prompt", f"{SAMPLES}"),
        *("--prompt-data", str(folder / "train.jsonl"), "--rollout-max-response-len", "12"),
        *("--rollout-mode", "fully_async", "--max-staleness", "2", "--partial-rollout"),
        *("--dynamic-sampling-filter-path", f"{ROOT}/tests/e2e/slime_plugins.py:two_of_three"),
        *("--custom-generate-function-path", f"{ROOT}/tests/e2e/slime_plugins.py:generate"),
        *("--custom-rm-path", f"{ROOT}/tests/e2e/slime_plugins.py:reward_func"),
        *("--reward-key", "score"),
        *("--eval-prompt-data", "--eval-config", str(folder / "sets.toml")),
        *("--eval-interval", f"{EVALUATED_EVERY}", "--rollout-health-check-interval", "1"),
        *("--eval-engines", "policy", "--update-weight-transport", "slices"),
        *("--save-debug-rollout-data", str(folder / "{rollout_id}.jsonl")),
    )
    with LocalRun(folder, settings) as local:
        local.kill_a_rank_and_an_engine(after_step=2)
        local.done()
        local.assert_recovered_within_its_attempt()
        # at the first connection and after the deaths, and where an update meets an evaluation
        assert local.num_plans_of_slices() >= 2
    return folder


def test_metrics_have_staleness_within_its_bound_and_dropped_groups(run: Path) -> None:
    lines = read_metrics(run / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    for line in lines[1:]:
        assert 0 <= line["rollout/staleness_mean"] <= line["rollout/staleness_max"] <= 2
        assert line["train/rollout_logprob_abs_diff"] < 1e-4 or line["rollout/staleness_max"] > 0
    assert max(line["rollout/staleness_max"] for line in lines[1:]) >= 1
    assert sum(line["rollout/num_filtered"] for line in lines[1:]) > 0


def test_evaluation_sets_have_separate_settings_and_pass_rates(run: Path) -> None:
    evaluated = [
        line
        for line in read_metrics(run / "run/metrics.jsonl")
        if "eval/greedy/reward_mean" in line
    ]
    assert [line["step"] for line in evaluated] == [0, EVALUATED_EVERY, NUM_STEPS]
    for line in evaluated:
        assert line["time/eval_beside_s"] > 0
        assert "eval/greedy/pass@1" not in line
        assert line["eval/drawn/pass@1"] == pytest.approx(line["eval/drawn/reward_mean"])
        assert line["eval/drawn/pass@1"] < line["eval/drawn/pass@2"] < line["eval/drawn/pass@4"]


def test_tool_output_is_in_the_answers_but_not_in_the_loss(run: Path, assets: Path) -> None:
    """In trained groups, tokens with loss mask 0 are the calculator's results for the text before
    them, and have no log-prob of an engine.
    """
    decode = PromptTokenizer(assets).decode
    groups = [
        group
        for step in range(NUM_STEPS)
        for group in read_groups(str(run / "{rollout_id}.jsonl"), step)
    ]
    samples = [scored.sample for group in groups for scored in group.samples]
    assert len({group.prompt_id for group in groups}) == len(groups) == NUM_STEPS * BATCH
    assert {len(group.samples) for group in groups} == {SAMPLES}
    called = [sample for sample in samples if sample.loss_mask is not None]
    assert called
    for sample in called:
        results = [
            [at for at, _ in part]
            for mask, part in groupby(enumerate(sample.mask), itemgetter(1))
            if not mask
        ]
        assert results, "an answer with a mask has tool output"
        assert all(sample.rollout_logprobs[at] == 0.0 for part in results for at in part)
        assert sample.extra == {"tool_calls": len(results)}, (
            "the recording has what the plug-in stored"
        )
        first = results[0]
        before = decode(
            [*sample.prompt_ids, *sample.response_ids[: first[0] - 1]]
        )  # without the digit that called the tool
        written, expected = decode([sample.response_ids[at] for at in first]), result(before)
        is_truncated = first[-1] == len(sample.mask) - 1  # the length limit was reached
        assert written == expected or (is_truncated and expected.startswith(written)), before


def test_every_fetched_prompt_is_trained_dropped_or_in_the_checkpoint(run: Path) -> None:
    """Fetched = trained + filtered + in the backlog of the last checkpoint, each prompt once."""
    newest = sorted((run / "run/checkpoints").glob(f"{PREFIX}*"))[-1]
    state = RunState.from_json((newest / "run_state.json").read_text())
    trained = [
        group.prompt_id
        for step in range(NUM_STEPS)
        for group in read_groups(str(run / "{rollout_id}.jsonl"), step)
    ]
    backlog = state.backlog
    assert state.step == NUM_STEPS and len(trained) == backlog.num_trained == NUM_STEPS * BATCH
    assert len({*trained, *backlog.prompt_ids}) == len(trained) + len(backlog.prompt_ids)
    assert backlog.num_fetched == backlog.num_trained + backlog.num_filtered + len(
        backlog.prompt_ids
    )
