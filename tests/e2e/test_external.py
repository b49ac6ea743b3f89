"""Engines that somebody else runs, weights through files, one step ahead; and each half of that run
by itself.

One server is started here, outside any run, and serves all of them: it stands in for somebody
else's. The runs build on each other: the first records what it trains, the second generates alone,
the third trains on the recording alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlpost.data.tokenizer import PromptTokenizer
from rlpost.metrics.writer import read_metrics
from rlpost.reward.gsm8k import gsm8k
from rlpost.rollout.client import EngineClient
from rlpost.rollout.engine import Engine
from rlpost.rollout.recorded import read_groups
from tests.e2e.runs import RECIPE, ROOT
from tests.ports import free_ports

GSM8K = ROOT / "tests/data/gsm8k/test.jsonl"
KEY = "somebody-elses-" + "9b1f" * 4  # in two parts: the run keeps a copy of this file
NUM_STEPS, BATCH = 3, 8
SETTINGS = (
    *(
        "--num-rollout",
        str(NUM_STEPS),
        "--rollout-batch-size",
        str(BATCH),
        "--n-samples-per-prompt",
        "4",
    ),
    *(
        "--actor-num-gpus-per-node",
        "1",
        "--tensor-model-parallel-size",
        "1",
        "--sequence-parallel",
        "false",
    ),
    *("--num-gpus-per-node", "1", "--skip-eval-before-train", "--eval-interval", str(NUM_STEPS)),
)


@dataclass(frozen=True)
class Elsewhere:
    """A server that no run started, and where runs of these tests go."""

    client: EngineClient
    folder: Path

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.client.url.removeprefix("http://")

    def submit(self, name: str, *settings: str) -> Path:
        """A run on this machine; its folder."""
        folder = self.folder / name
        command = [
            sys.executable,
            "-m",
            "rlpost.submit",
            RECIPE,
            "--local",
            "--run-folder",
            str(folder),
        ]
        command += ["--rollout-external-engine-addrs", self.address]
        environment = {**os.environ, "SGLANG_API_KEY": KEY}
        done = subprocess.run(
            [*command, *SETTINGS, *settings],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return folder


@pytest.fixture(scope="module")
def elsewhere(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    folder = tmp_path_factory.mktemp("external")
    settings = {"max_running_requests": 64, "max_total_tokens": 8192}
    engine = Engine(
        model_path=str(assets), api_key=KEY, server_args=settings, log_path=folder / "engine.log"
    )
    try:
        address = engine.start("127.0.0.1", free_ports(1)[0], deadline_s=600)
        yield Elsewhere(EngineClient(address.url, KEY), folder)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def whole(elsewhere: Elsewhere) -> Path:
    """Both halves: trained here, generated there, weights through files."""
    return elsewhere.submit(
        "whole",
        *("--rollout-mode", "one_step_off", "--update-weight-transport", "disk"),
        *("--save-debug-rollout-data", str(elsewhere.folder / "whole-{rollout_id}.jsonl")),
    )


def end_of(run: Path) -> dict[str, object]:
    """What the ledger says last of a run."""
    return json.loads((run / "ledger.jsonl").read_text().splitlines()[-1])


def test_an_external_engine_is_asked_with_its_own_key_and_has_the_weights_at_the_end(
    elsewhere: Elsewhere, whole: Path
) -> None:
    """The engine answers nobody without the key, which is in the one file for keys and in no other
    of the run.
    """
    assert asyncio.run(elsewhere.client.weight_version()) == str(NUM_STEPS)
    assert (whole / "secrets.env").read_text() == f"SGLANG_API_KEY={KEY}\n"
    assert (whole / "secrets.env").stat().st_mode & 0o777 == 0o600
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != "secrets.env"]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_one_step_off_generates_ahead_of_the_weights_and_trains_every_step(
    elsewhere: Elsewhere, whole: Path
) -> None:
    """Batches after the first were written by the weights before the last update, and by no older
    ones.
    """
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [line["rollout/staleness_max"] for line in lines] == [0, 1, 1]
    assert lines[0]["train/rollout_logprob_abs_diff"] < 1e-4, "the engine had the trainer's weights"
    assert "eval/heldout/reward_mean" in lines[-1]
    template = str(elsewhere.folder / "whole-{rollout_id}.jsonl")
    groups = [group for step in range(NUM_STEPS) for group in read_groups(template, step)]
    assert len({group.prompt_id for group in groups}) == NUM_STEPS * BATCH


def test_weights_that_went_through_files_leave_none_behind(whole: Path) -> None:
    assert not list((whole / "attempts").rglob("*.safetensors"))
    assert not list((whole / "attempts").rglob("version-*"))


@pytest.fixture(scope="module")
def gsm8k_run(elsewhere: Elsewhere) -> Path:
    """GSM8K's questions, in bfloat16 at the learning rate of the published recipes, changes alone
    sent to the engine.

    The tiny model answers none of them right; the bonus for entropy is what it learns from.
    """
    return elsewhere.submit(
        "gsm8k",
        *(
            "--prompt-data",
            str(GSM8K),
            "--input-key",
            "question",
            "--label-key",
            "answer",
            "--rm-type",
            "gsm8k",
        ),
        *("--eval-prompt-data", "gsm8k", f"{GSM8K}@[0:4]"),
        *("--rollout-shuffle", "false", "--entropy-coef", "0.01", "--bf16", "true", "--lr", "1e-6"),
        *("--update-weight-transport", "disk", "--update-weight-mode", "delta"),
        *("--save-debug-rollout-data", str(elsewhere.folder / "gsm8k-{rollout_id}.jsonl")),
    )


def test_gsm8k_goes_through_the_whole_pipeline(elsewhere: Elsewhere, gsm8k_run: Path) -> None:
    """From the file's questions to trained steps: each question once, whole, graded against its own
    solution.
    """
    template = str(elsewhere.folder / "gsm8k-{rollout_id}.jsonl")
    groups = [group for step in range(NUM_STEPS) for group in read_groups(template, step)]
    problems = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    tokenizer = PromptTokenizer(ROOT / "assets/tiny")
    assert len(groups) == len(problems) == NUM_STEPS * BATCH
    for group, problem in zip(groups, problems, strict=True):
        for scored in group.samples:
            sample = scored.sample
            assert sample.prompt_ids == tuple(tokenizer.encode(problem["question"]))
            assert sample.label == problem["answer"]
            assert scored.reward == gsm8k(sample.text, problem["answer"], {})
    lines = read_metrics(gsm8k_run / "metrics.jsonl")
    assert len(lines) == NUM_STEPS and all(line["train/grad_norm"] > 0 for line in lines)
    assert "eval/gsm8k/reward_mean" in lines[-1]


def test_an_engine_that_is_given_only_what_changed_is_told_a_fraction_of_the_weights(
    elsewhere: Elsewhere, gsm8k_run: Path
) -> None:
    """The copy that the engine reads is checked bit by bit on the way, and the trainer finds the
    log-probs that the engine told, as far as bfloat16 goes.
    """
    run = gsm8k_run
    log = (run / "attempts" / "latest" / "actor-0.log").read_text()
    (whole,) = re.findall(r"version-0000000: (\d+) bytes, 1\.0000 of the elements changed", log)
    lines = read_metrics(run / "metrics.jsonl")
    assert len(lines) == NUM_STEPS
    for line in lines:
        assert 0.0 < line["sync/changed_frac"] < 0.1
        assert line["sync/weights_bytes"] < int(whole) / 5
        assert line["train/rollout_logprob_abs_diff"] < 0.05
    assert asyncio.run(elsewhere.client.weight_version()) == str(NUM_STEPS)
    assert not list((run / "attempts").rglob("*.safetensors")) and not list(
        (run / "attempts").rglob("delta.bin")
    )


def test_the_training_half_alone_ends_at_the_same_weights_bit_for_bit(
    elsewhere: Elsewhere, whole: Path
) -> None:
    """On the recording of the whole run, without an engine; nothing is evaluated."""
    template = str(elsewhere.folder / "whole-{rollout_id}.jsonl")
    half = elsewhere.submit("trainer", "--debug-train-only", "--load-debug-rollout-data", template)
    assert end_of(half)["weights"] == end_of(whole)["weights"]
    assert not list((half / "attempts").rglob("engine-*")) and not list(
        (half / "attempts").rglob("router*")
    )
    trained, before = read_metrics(half / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl")
    for name in ("train/loss", "train/grad_norm", "reward/mean"):
        assert [line[name] for line in trained] == [line[name] for line in before], name
    assert not [key for line in trained for key in line if key.startswith("eval/")]


def test_the_generating_half_alone_records_and_evaluates_without_a_trainer(
    elsewhere: Elsewhere, whole: Path
) -> None:
    """A step counts as a version though the weights stay, and nothing is saved."""
    template = str(elsewhere.folder / "half-{rollout_id}.jsonl")
    half = elsewhere.submit(
        "rollout",
        *("--debug-rollout-only", "--save-debug-rollout-data", template),
    )
    for step in range(NUM_STEPS):
        groups = read_groups(template, step)
        assert len(groups) == BATCH
        assert {scored.sample.policy_version for group in groups for scored in group.samples} == {
            step
        }
    assert not list((half / "attempts").rglob("actor-*")) and not list(
        (half / "checkpoints").glob("iter_*")
    )
    assert "eval/heldout/reward_mean" in read_metrics(half / "metrics.jsonl")[-1]
