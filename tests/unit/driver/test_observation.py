"""Measurements of a step: throughput, idle times, model FLOPs, memory, traces and profiles."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from rlpost.config.tree import Config
from rlpost.driver import observation as module
from rlpost.driver.checkpoints import SaveTimes
from rlpost.driver.observation import (
    SLOW_STEPS,
    Observation,
    SlowEngines,
    pace,
    run_metrics,
    steps_again,
    use_metrics,
)
from rlpost.driver.worker_groups import ActorGroup
from rlpost.engines.places import Use
from rlpost.errors import Preempted, RlpostError
from rlpost.observe.spans import SPANS, ProcessSpans, span
from rlpost.types import Sample, SampleGroup, ScoredSample
from tests.metric_names import undeclared

HF = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}


def config(**tables):
    cluster = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}
    return Config.model_validate({"cluster": cluster, **tables})


def groups(length=10):
    sample = Sample(
        0, 0, tuple(range(4)), tuple(range(length - 4)), (-1.0,) * (length - 4), "", "stop", 0
    )
    return [SampleGroup(0, (ScoredSample(sample, 1.0),) * 2)]


class Actors:
    """Two ranks that record their calls; with ``is_dead``, ``call_aside`` fails."""

    def __init__(self, *, is_dead=False):
        self.asked, self.is_dead = [], is_dead

    def __len__(self):
        return 2

    async def call(self, method, *arguments):
        self.asked.append((method, *arguments))
        return {"peak_flops": [1e12, 1e12]}.get(method, [["a"], []])

    async def call_each(self, method, arguments, **named):
        self.asked.append((method, *arguments[0], named))

    async def call_aside(self, method):
        if self.is_dead:
            raise RlpostError("actor-1 died")
        return [{"memory/actor_gb": 1.5}, {"memory/actor_gb": 2.5}]

    async def spans(self, since):
        return [ProcessSpans("actor-0", SPANS.since(since))]


def observation(tmp_path, checkpoints=None, **observe):
    checkpoints = checkpoints or SimpleNamespace(last=None)
    return Observation(
        config(observe=observe), HF, checkpoints=checkpoints, traces=tmp_path / "traces"
    )


async def train(look, step, train_s=2.0):
    async def training():
        return {"train/loss": 0.5}

    with span("step"):
        await look.around(groups(), training())
        with span("update weights"):
            pass
    return await look.measure(
        step, {"time/step_s": 4.0, "time/train_s": train_s, "rollout/num_tokens": 80}
    )


def test_pace_is_tokens_per_gpu_and_the_idle_fractions_of_a_step():
    found = pace(
        {"time/step_s": 4.0, "time/train_s": 1.0, "time/generate_s": 2.0, "rollout/num_tokens": 80},
        config(),
    )
    assert found == {
        "time/tokens_per_s_per_gpu": 5.0,
        "time/trainer_waits_frac": 0.75,
        "time/generation_waited_frac": 0.5,
    }
    assert pace({}, config()) == {}


async def test_a_line_has_the_times_of_sync_and_checkpoint_and_each_checkpoint_once(tmp_path):
    checkpoints = SimpleNamespace(last=None)
    look = observation(tmp_path, checkpoints)
    await look.attach(ActorGroup(Actors()), None, SimpleNamespace(num_bytes=1000))
    first = await train(look, 1)
    checkpoints.last = SaveTimes(1, 0.25, 2.5, 4000)
    first, second, third = first, await train(look, 2), await train(look, 3)
    assert undeclared({*first, *second}) == []
    assert first["memory/actor_gb"] == 2.5 and first["memory/driver_gb"] > 0.01
    assert first["sync/weights_bytes"] == 1000
    assert 0 <= first["sync/update_s"] < 1
    # the peak is 1 TFLOP/s
    assert first["perf/mfu_frac"] == pytest.approx(first["perf/train_tflops_per_gpu"])
    saved = {key: value for key, value in second.items() if key.startswith("checkpoint/")}
    assert saved == {
        "checkpoint/blocking_s": 0.25,
        "checkpoint/total_s": 2.5,
        "checkpoint/written_bytes": 4000,
    }
    assert not [key for line in (first, third) for key in line if key.startswith("checkpoint/")]


async def test_an_actor_that_does_not_answer_is_missing_from_the_metrics_and_the_run_continues(
    tmp_path, caplog
):
    look = observation(tmp_path)
    await look.attach(ActorGroup(Actors(is_dead=True)), None, None)
    found = await train(look, 1)
    assert "memory/driver_gb" in found and "memory/actor_gb" not in found
    assert "actor-1 died" in caplog.text


async def test_only_chosen_steps_are_traced_with_the_phases_after_them(tmp_path):
    look = observation(tmp_path, trace_steps="2:3")
    await look.attach(ActorGroup(Actors()), None, None)
    for step in range(1, 6):
        await train(look, step)
        with span(f"save {step}"):
            pass
    await look.close()
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "steps-2-3.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert names == ["step", "update weights", "save 2", "step", "update weights", "save 3"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "driver",
        "actor-0",
    }


async def test_a_run_that_ends_within_the_chosen_steps_writes_a_partial_trace(tmp_path):
    look = observation(tmp_path, trace_steps="1:9")
    await look.attach(ActorGroup(Actors()), None, None)
    for step in (1, 2):
        await train(look, step)
    await look.close()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps-1-2.json"]


def test_the_profiler_runs_over_its_steps_and_ends_with_the_run(tmp_path):
    async def run(num_steps):
        look, actors = (
            observation(tmp_path, profile=True, profile_step_start=2, profile_step_end=4),
            Actors(),
        )
        await look.attach(ActorGroup(actors), None, None)
        for step in range(1, num_steps + 1):
            await train(look, step)
        await look.close()
        return [(asked[0], asked[-1]) for asked in actors.asked if asked[0].startswith("profiling")]

    what = {"operators": True, "memory": False}
    assert asyncio.run(run(1)) == []
    assert asyncio.run(run(2)) == [("profiling.begin", what), ("profiling.end", "2-2")]
    assert asyncio.run(run(6)) == [("profiling.begin", what), ("profiling.end", "2-3")]


async def test_a_run_that_has_to_leave_does_not_wait_for_a_profile(tmp_path, caplog, monkeypatch):
    """Otherwise the job would be killed before the driver has reported that it can be resumed."""

    class Hung(Actors):
        async def call(self, method, *arguments):
            return await (
                asyncio.Event().wait()
                if method == "profiling.end"
                else super().call(method, *arguments)
            )

    async def left():
        raise Preempted("between two micro-batches of the last step to profile")

    monkeypatch.setattr(module, "LEAVE_S", 0.05)
    look = observation(tmp_path, profile=True, profile_step_start=1, profile_step_end=3)
    await look.attach(ActorGroup(Hung()), None, None)
    await train(look, 1)
    async with asyncio.timeout(30):
        with pytest.raises(Preempted):
            await look.around(groups(), left())
        await look.close(is_leaving=True)
    assert "are lost" in caplog.text


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "traces").write_text("a file where the folder should be")

    async def run():
        look = observation(tmp_path, trace_steps="1")
        await look.attach(ActorGroup(Actors()), None, None)
        return [await train(look, step) for step in (1, 2)]

    assert len(asyncio.run(run())) == 2
    assert "not measured: FileExistsError" in caplog.text


def test_an_attempt_counts_earlier_attempts_and_restarts():
    events = [
        {"event": name} for name in ("submitted", "started", "preempted", "started", "committed")
    ]
    events += [
        {"event": "recovered", "role": "engine", "engines": [0, 3]},
        {"event": "recovered", "role": "engine", "engines": [3]},
        {"event": "recovered", "role": "trainer", "engines": [1]},
        {"event": "engine_lost", "engines": [3]},
    ]
    assert run_metrics(events) == {
        "run/num_attempts": 2,
        "run/num_preemptions": 1,
        "run/num_engine_restarts": 3,
    }


def test_steps_after_the_checkpoint_count_as_repeated_and_evaluations_do_not():
    lines = [
        {"step": 0, "time/eval_s": 9.0},
        *({"step": step, "time/step_s": 10.0 + step} for step in (1, 2, 3)),
    ]
    assert steps_again(lines, step=1) == {"steps": 2, "step_s": 25.0}
    assert steps_again(lines, step=3) == steps_again([], step=0) == {"steps": 0, "step_s": 0}


def test_the_metrics_of_a_step():
    use = {"http://a": Use(3, 300, 1000, 900), "http://b": Use(1, 100, 200, 0)}
    assert use_metrics(use, 2, {"http://a": 1.2, "http://b": 0.5}, 5000.0) == {
        "engines/tokens_in_flight_max": 5000.0,
        "engines/imbalance": 1.5,
        "engines/prefix_hit_frac": 0.75,
        "engines/conversations_moved": 2,
        "engines/slowest_pace": 0.5,
    }


def test_a_step_without_an_answer_has_no_ratios():
    assert use_metrics({}, 0, {}, 0.0) == {
        "engines/conversations_moved": 0,
        "engines/tokens_in_flight_max": 0.0,
    }


@pytest.mark.parametrize(
    ("paces", "named"),
    [
        ([], None),
        ([0.1], None),
        ([1.0, 0.5], None),  # noise of two engines on a busy machine
        ([1.0, 0.32], "3.1 x"),
        ([1.0, 1.0, 0.8, 1.1], None),
        ([1.0, 1.0, 0.5, 1.1], "2.0 x"),
    ],
)
def test_an_engine_is_reported_once_after_it_has_been_slow_for_several_steps(paces, named):
    paces = {f"http://{number}": pace for number, pace in enumerate(paces)}
    engines, fast = SlowEngines(), dict.fromkeys(paces, 1.0)
    before = [engines.take(one) for one in [paces] * (SLOW_STEPS - 1) + [fast]]
    assert not any(before), "it has recovered"
    reports = [sentence for _ in range(3 * SLOW_STEPS) for sentence in engines.take(paces)]
    assert len(reports) == (0 if len(paces) < 2 or named is None else 1)
    assert named is None or named in reports[0]
