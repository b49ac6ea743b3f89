"""The rollout of a whole run on this machine, with real engines, router, trainer and checkpoints.

One run has what goes together: a fully asynchronous loop, a filter that drops groups, partial
answers, a tool in the middle of the answers, evaluation sets with settings of their own; a trainer
rank and an engine that are killed. Filter, tool and reward are plug-ins of slime.
"""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pytest

from rlpost.checkpoint.state import RunState
from rlpost.data.tokenizer import PromptTokenizer
from rlpost.metrics.writer import read_metrics
from rlpost.rollout.examples.calculator import result
from rlpost.rollout.recorded import read_groups
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ROOT

NUM_STEPS, EVALUATED_EVERY = 8, 4
BATCH, SAMPLES = 8, 8


@pytest.fixture(scope="module")
def run(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run; its prompts end before the "=", so that the calculator finds a sum when it is
    asked.
    """
    folder = tmp_path_factory.mktemp("rollout of 50 %")
    lines = [json.loads(line) for line in (assets / "train.jsonl").read_text().splitlines()]
    asked = [{**line, "prompt": line["prompt"].removesuffix("=")} for line in lines]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    heldout = assets / "heldout.jsonl"
    (folder / "sets.toml").write_text(
        '[defaults]\ncustom_generate_function_path = "rlpost.rollout.examples.calculator.generate"\n'
        f'[[datasets]]\nname = "greedy"\npath = "{heldout}"\ntemperature = 0.0\n'
        f'[[datasets]]\nname = "drawn"\npath = "{heldout}"\nn_samples_per_eval_prompt = 4\ntemperature = 1.0\n'
    )
    settings = (
        *(
            "--num-rollout",
            f"{NUM_STEPS}",
            "--rollout-batch-size",
            f"{BATCH}",
            "--n-samples-per-prompt",
            f"{SAMPLES}",
        ),
        *("--prompt-data", str(folder / "train.jsonl"), "--rollout-max-response-len", "12"),
        *("--rollout-mode", "fully_async", "--max-staleness", "2", "--partial-rollout"),
        *("--dynamic-sampling-filter-path", f"{ROOT}/tests/e2e/slime_plugins.py:two_of_three"),
        *("--custom-generate-function-path", f"{ROOT}/tests/e2e/slime_plugins.py:generate"),
        *(
            "--custom-rm-path",
            f"{ROOT}/tests/e2e/slime_plugins.py:reward_func",
            "--reward-key",
            "score",
        ),
        *("--eval-prompt-data", "--eval-config", str(folder / "sets.toml")),
        *("--eval-interval", f"{EVALUATED_EVERY}", "--rollout-health-check-interval", "1"),
        *("--save-debug-rollout-data", str(folder / "{rollout_id}.jsonl")),
    )
    with LocalRun(folder, settings) as local:
        local.kill_a_rank_and_an_engine(after_step=2)
        local.done()
        local.assert_went_on_in_its_attempt()
    return folder


def test_every_way_of_the_async_rollout_ends_in_metrics(run: Path) -> None:
    lines = read_metrics(run / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    for line in lines[1:]:
        assert 0 <= line["rollout/staleness_mean"] <= line["rollout/staleness_max"] <= 2
        assert line["train/rollout_logprob_abs_diff"] < 1e-4 or line["rollout/staleness_max"] > 0
    assert max(line["rollout/staleness_max"] for line in lines[1:]) >= 1
    assert sum(line["rollout/num_filtered"] for line in lines[1:]) > 0


def test_eval_sets_have_settings_and_pass_rates_of_their_own(run: Path) -> None:
    evaluated = [
        line
        for line in read_metrics(run / "run/metrics.jsonl")
        if "eval/greedy/reward_mean" in line
    ]
    assert [line["step"] for line in evaluated] == [0, EVALUATED_EVERY, NUM_STEPS]
    for line in evaluated:
        assert "eval/greedy/pass@1" not in line
        assert line["eval/drawn/pass@1"] == pytest.approx(line["eval/drawn/reward_mean"])
        assert line["eval/drawn/pass@1"] < line["eval/drawn/pass@2"] < line["eval/drawn/pass@4"]


def test_what_the_tool_wrote_is_in_the_answers_and_not_in_the_loss(run: Path, assets: Path) -> None:
    """The trained groups: where the loss mask is 0 stands what the calculator says of the text
    before, and nothing else; the engine never gave it a log-prob.
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
        told = [
            [at for at, _ in part]
            for mask, part in groupby(enumerate(sample.mask), itemgetter(1))
            if not mask
        ]
        assert told, "an answer with a mask holds words of the tool"
        assert all(sample.rollout_logprobs[at] == 0.0 for part in told for at in part)
        assert sample.extra == {"tool_calls": len(told)}, (
            "what the plug-in left is in the recording"
        )
        first = told[0]
        before = decode(
            [*sample.prompt_ids, *sample.response_ids[: first[0] - 1]]
        )  # less the digit that asked
        said, wanted = decode([sample.response_ids[at] for at in first]), result(before)
        is_cut = first[-1] == len(sample.mask) - 1  # there was no room for the rest
        assert said == wanted or (is_cut and wanted.startswith(said)), (before, said)


def test_partial_and_finished_groups_of_the_async_run_are_all_accounted_for(run: Path) -> None:
    """Fetched = trained + filtered + what the last checkpoint holds, and each once."""
    newest = sorted((run / "run/checkpoints").glob("iter_*"))[-1]
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
