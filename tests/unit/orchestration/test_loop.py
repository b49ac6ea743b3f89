"""The real loop with stages in this process: order, preemption at every stage, and a resume that changes nothing."""

import asyncio
import hashlib
import json
from dataclasses import replace

import pytest

from rlpost.checkpoint.state import RunState
from rlpost.config.load import load
from rlpost.data.cursor import PromptCursor
from rlpost.errors import Preempted
from rlpost.metrics.writer import MetricsWriter, read_metrics
from rlpost.orchestration.loop import Loop
from rlpost.orchestration.preemption import StopRequest
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample


class Prompts:
    """Ten prompts without a file."""

    def __len__(self):
        return 10

    def prompt(self, position, prompt_id):
        return Prompt(prompt_id, f"p{position}", (position,), str(position))


class FakeStages:
    """Weights are a hash of all that was trained, in order; ``stop_at`` requests a stop in the n-th call of a stage."""

    def __init__(self, stop=None, stop_at=None):
        self.weights, self.saved, self.versions, self.seen = "", None, [], []
        self.stop, self.stop_at, self.calls = stop, stop_at, {}

    def _enter(self, stage):
        self.calls[stage] = self.calls.get(stage, 0) + 1
        if self.stop_at == (stage, self.calls[stage]):
            self.stop.write_text('{"reason": "test"}')
            raise Preempted("test")

    async def generate(self, prompts, step):
        self._enter("generate")
        groups = []
        for prompt in prompts:
            rewards = [
                int(hashlib.sha256(f"{self.weights}{prompt.prompt_id}{i}".encode()).hexdigest(), 16) % 2 for i in (0, 1)
            ]
            samples = [Sample(prompt.prompt_id, i, (1,), (2, 3), (-0.1, -0.2), "", "stop", step) for i in (0, 1)]
            groups.append(SampleGroup(prompt.prompt_id, tuple(map(ScoredSample, samples, map(float, rewards)))))
        return groups

    async def train(self, groups):
        self._enter("train")
        self.seen += [group.prompt_id for group in groups]
        trained = json.dumps([[group.prompt_id, group.rewards] for group in groups])
        self.weights = hashlib.sha256((self.weights + trained).encode()).hexdigest()
        return {"train/loss": int(self.weights[:4], 16) / 1e4, "train/grad_norm": 1.0}

    async def sync(self, policy_version):
        self.versions.append(policy_version)
        if policy_version > 0:
            self._enter("sync")

    async def evaluate(self):
        self._enter("evaluate")
        return {"eval/heldout/reward_mean": int(self.weights[:4] or "0", 16) / 65536}

    async def save(self, state):
        self.saved = (state, self.weights)


def config(**rollout):
    return load(
        [],
        {
            "rollout": {"num_rollout": 6, "rollout_batch_size": 4, "n_samples_per_prompt": 2, **rollout},
            "eval": {"eval_interval": 2, "eval_prompt_data": ["heldout", "x"]},
            "checkpoint": {"save_interval": 3},
        },
    ).config


def run(folder, stages, state, saved=False):
    cursor = PromptCursor(Prompts(), shuffle=True, seed=1)
    if state.cursor:
        cursor = PromptCursor.from_state(Prompts(), state.cursor, shuffle=True, seed=1)
    metrics = MetricsWriter(folder / "metrics.jsonl")
    metrics.rewind(state.step if state.pending is None else state.step - 1)
    loop = Loop(stages, config(), cursor=cursor, metrics=metrics, stop=StopRequest(folder / "STOP"))
    return asyncio.run(loop.run(state, saved=saved))


def comparable(folder):
    """Metrics lines without what a clock says."""
    return [
        {key: value for key, value in line.items() if not key.startswith("time/")}
        for line in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.fixture
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    stages = FakeStages()
    run(folder, stages, RunState(pending={}))
    return stages, comparable(folder)


def test_every_step_generates_trains_and_synchronises_once_and_evaluates_when_due(untouched):
    stages, lines = untouched
    assert stages.versions == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/heldout/reward_mean" in line] == [0, 2, 4, 6]
    assert stages.seen == list(range(24))
    assert stages.saved[0] == RunState(step=6, cursor={"epoch": 2, "offset": 4, "num_prompts": 10})


STOPS = [
    *((stage, count) for stage in ("generate", "train", "sync") for count in range(1, 7)),
    *(("evaluate", count) for count in range(1, 5)),
]


@pytest.mark.parametrize("stop_at", STOPS, ids=lambda stop: f"{stop[0]}-{stop[1]}")
def test_a_stop_in_any_stage_and_a_resume_give_the_same_weights_and_metrics(tmp_path, untouched, stop_at):
    stop = tmp_path / "STOP"
    first = FakeStages(stop, stop_at)
    with pytest.raises(Preempted):
        run(tmp_path, first, RunState(pending={}))
    state, weights = first.saved
    stop.unlink()
    second = FakeStages()
    second.weights = weights
    run(tmp_path, second, RunState.from_json(state.to_json()), saved=True)
    assert second.weights == untouched[0].weights
    assert comparable(tmp_path) == untouched[1]
    assert (first.seen + second.seen) == list(range(24))


def test_a_crash_without_a_save_goes_on_from_the_last_checkpoint_without_a_double_line(tmp_path, untouched):
    class Crash(FakeStages):
        async def train(self, groups):
            if len(self.seen) == 16:
                raise RuntimeError("killed")
            return await super().train(groups)

    first = Crash()
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path, first, RunState(pending={}))
    state, weights = first.saved
    assert state.step == 3
    second = FakeStages()
    second.weights = weights
    run(tmp_path, second, state, saved=True)
    assert second.weights == untouched[0].weights
    assert comparable(tmp_path) == untouched[1]


def test_a_finished_run_started_again_does_nothing(tmp_path, untouched):
    state = untouched[0].saved[0]
    stages = FakeStages()
    assert run(tmp_path, stages, state, saved=True) == state
    assert stages.seen == [] and stages.saved is None


def test_a_state_reads_back_equal():
    state = RunState(step=3, cursor={"epoch": 1, "offset": 2, "num_prompts": 10}, pending={"a": 0.1})
    assert RunState.from_json(state.to_json()) == state
    assert replace(state, pending=None) == state.settled()
