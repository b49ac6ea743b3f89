"""External engines, weights sent through files, one-step-off generation on GSM8K; and the train-only
and rollout-only modes.

One server is started outside any run and serves all runs. The runs build on each other: the first
records what it trains, another generates alone, a third trains on the recording alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlpost.durable.commit import PREFIX
from rlpost.durable.recorded import read_groups
from rlpost.engines.engine import Engine
from rlpost.engines.engine_client import EngineClient
from rlpost.observe.writer import read_metrics
from rlpost.tasks.reward.gsm8k import gsm8k
from rlpost.tasks.tokenizer import PromptTokenizer
from tests.e2e.runs import RECIPE, ROOT
from tests.ports import free_ports

GSM8K = ROOT / "tests/data/gsm8k/test.jsonl"
KEY = "external-key-" + "9b1f" * 4  # in two parts: the run keeps a copy of this file
NUM_STEPS, BATCH = 3, 8
SETTINGS = (
    *("--num-rollout", str(NUM_STEPS), "--rollout-batch-size", str(BATCH)),
    *("--n-samples-per-prompt", "4", "--actor-num-gpus-per-node", "1"),
    *("--tensor-model-parallel-size", "1", "--sequence-parallel", "false"),
    *("--num-gpus-per-node", "1", "--skip-eval-before-train", "--eval-interval", str(NUM_STEPS)),
)
TRAINING = ("--entropy-coef", "0.01", "--bf16", "true", "--lr", "1e-6")


@dataclass(frozen=True)
class ExternalEngine:
    """A server that no run started, and the folder of the runs."""

    client: EngineClient
    folder: Path

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.client.url.removeprefix("http://")

    def recording(self, name: str) -> str:
        """The files in which a run records its generations."""
        return str(self.folder / f"{name}-{{rollout_id}}.jsonl")

    def submit(self, name: str, *settings: str) -> Path:
        """Run on this machine to the end; return the run's folder."""
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
def external(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalEngine]:
    folder = tmp_path_factory.mktemp("external")
    settings = {"max_running_requests": 64, "max_total_tokens": 8192}
    engine = Engine(
        model_path=str(assets), api_key=KEY, server_args=settings, log_path=folder / "engine.log"
    )
    try:
        address = engine.start("127.0.0.1", free_ports(1)[0], deadline_s=600)
        yield ExternalEngine(EngineClient(address.url, KEY), folder)
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def whole(external: ExternalEngine) -> Path:
    """The folder of a run that trains and generates on GSM8K in bfloat16, with the learning rate of
    the published recipes and weights sent through files.

    The tiny model answers no question correctly; it learns from the entropy bonus.
    """
    return external.submit(
        "whole",
        *("--rollout-mode", "one_step_off", "--update-weight-transport", "disk"),
        *("--prompt-data", str(GSM8K), "--input-key", "question", "--label-key", "answer"),
        *("--rm-type", "gsm8k", "--rollout-shuffle", "false", *TRAINING),
        *("--eval-prompt-data", "gsm8k", f"{GSM8K}@[0:4]"),
        *("--save-debug-rollout-data", external.recording("whole")),
    )


def end_of(run: Path) -> dict[str, object]:
    """Return the entry of the ledger with which the run ended; the attempt's verdict follows it."""
    entries = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["event"] == "done"][-1]


def test_an_external_engine_gets_requests_with_its_key_and_the_final_weights(
    external: ExternalEngine, whole: Path
) -> None:
    """The engine refuses requests without the key, which is in the run's file of keys alone."""
    assert asyncio.run(external.client.weight_version()) == str(NUM_STEPS)
    assert (whole / "secrets.env").read_text() == f"SGLANG_API_KEY={KEY}\n"
    assert (whole / "secrets.env").stat().st_mode & 0o777 == 0o600
    files = [path for path in whole.rglob("*") if path.is_file() and path.name != "secrets.env"]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_one_step_off_trains_every_step_one_version_behind(whole: Path) -> None:
    """Batches after the first were generated by the version before the last, and by no older one.
    Log-probs of engine and trainer agree within the precision of bfloat16.
    """
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [line["rollout/staleness_max"] for line in lines] == [0, 1, 1]
    for line in lines:
        assert line["train/grad_norm"] > 0 and line["sync/weights_bytes"] > 0
        assert line["train/rollout_logprob_abs_diff"] < 0.05
    assert "eval/gsm8k/reward_mean" in lines[-1]


def test_files_of_sent_weights_are_removed(whole: Path) -> None:
    assert not list((whole / "attempts").rglob("*.safetensors"))
    assert not list((whole / "attempts").rglob("version-*"))


def test_every_gsm8k_question_is_answered_graded_and_trained_once(
    external: ExternalEngine, whole: Path
) -> None:
    """Each question of the file is asked whole and graded against its own solution."""
    template = external.recording("whole")
    groups = [group for step in range(NUM_STEPS) for group in read_groups(template, step)]
    groups.sort(key=lambda group: group.prompt_id)
    problems = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    tokenizer = PromptTokenizer(ROOT / "assets/tiny")
    assert len(groups) == len(problems) == NUM_STEPS * BATCH
    for group, problem in zip(groups, problems, strict=True):
        for scored in group.samples:
            sample = scored.sample
            assert sample.prompt_ids == tuple(tokenizer.encode(problem["question"]))
            assert sample.label == problem["answer"]
            assert scored.reward == gsm8k(sample.text, problem["answer"], {})


def test_train_only_mode_ends_with_equal_weights(external: ExternalEngine, whole: Path) -> None:
    """It trains on the recording of the whole run, starts no engine and evaluates nothing."""
    recording = ("--load-debug-rollout-data", external.recording("whole"))
    run = external.submit("trainer", "--debug-train-only", *recording, *TRAINING)
    assert end_of(run)["weights"] == end_of(whole)["weights"]
    assert not list((run / "attempts").rglob("engine-*"))
    trained, before = read_metrics(run / "metrics.jsonl"), read_metrics(whole / "metrics.jsonl")
    for name in ("train/loss", "train/grad_norm", "reward/mean"):
        assert [line[name] for line in trained] == [line[name] for line in before], name
    assert not [key for line in trained for key in line if key.startswith("eval/")]


def test_rollout_only_mode_records_and_evaluates_without_a_trainer(
    external: ExternalEngine, whole: Path
) -> None:
    """Each step counts as a policy version although the weights do not change; nothing is saved."""
    template = external.recording("half")
    run = external.submit(
        "rollout",
        *("--debug-rollout-only", "--save-debug-rollout-data", template),
    )
    for step in range(NUM_STEPS):
        groups = read_groups(template, step)
        assert len(groups) == BATCH
        assert {scored.sample.policy_version for group in groups for scored in group.samples} == {
            step
        }
    assert not list((run / "attempts").rglob("actor-*")) and not list(
        (run / "checkpoints").glob(f"{PREFIX}*")
    )
    assert "eval/heldout/reward_mean" in read_metrics(run / "metrics.jsonl")[-1]
