"""A run with two judges and with evaluation beside training, on engines of their own.

An engine of the first judge dies, then that of the second, which joins from another job, then the
driver; answers are judged again, and every evaluation is in the line of its step.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from common.exit_codes import EXIT_DONE
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_view import used_of
from rlpost.observe.writer import read_metrics
from tests.e2e.local_run import LocalRun
from tests.e2e.runs import ROOT, process_of

NUM_STEPS, EVALUATED_EVERY = 8, 2
ASKS = "[engines.second] needs 1: its requests wait, and rlpost fleet "
EVALUATED = "eval/heldout/reward_mean"


@pytest.fixture(scope="module")
def run(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run."""
    folder = tmp_path_factory.mktemp("groups")
    (folder / "recipe.toml").write_text(
        f"""\
base = "tiny"
[cluster]
num_gpus_per_node = 4
actor_num_gpus_per_node = 1
rollout_num_gpus = 1
[perf]
tensor_model_parallel_size = 1
sequence_parallel = false
[checkpoint]
hf_checkpoint = "{assets}"
save_interval = 3
[rollout]
prompt_data = "{assets}/train.jsonl"
custom_rm_path = "{ROOT}/tests/e2e/judge.py:reward"
num_rollout = {NUM_STEPS}
rollout_batch_size = 8
[eval]
eval_interval = {EVALUATED_EVERY}
eval_prompt_data = ["heldout", "{assets}/heldout.jsonl@[0:50]"]
eval_engines = "evaluator"
[sglang]
rollout_health_check_interval = 1.0
[engines.judge]
model = "{assets}"
sglang_max_total_tokens = 4096
[engines.second]
model = "{assets}"
fleet = true
engines = 0
sglang_max_total_tokens = 4096
[engines.evaluator]
follows_policy = true
sglang_max_total_tokens = 4096
"""
    )
    with LocalRun(folder, (), recipe=str(folder / "recipe.toml")) as local, ExitStack() as agents:
        fleet = FleetFolder(local.folder, "second")
        local.until(lambda: fleet.lease() is not None, "a lease of the second judge")
        local.until(lambda: ASKS in local.log.read_text(), "answers that wait for the second judge")
        agents.enter_context(agent_of(fleet, "one"))
        local.until(lambda: local.step >= 1, "step 1")
        process_of(fleet.logs / "one-server.log").kill()
        later = agents.enter_context(agent_of(fleet, "two"))
        local.until(lambda: local.step >= 2, "step 2")
        process_of(local.folder / "attempts/0/engine-judge-0-server.log").kill()
        local.until(lambda: bool(local.recovered), "a new judge")
        local.driver().kill()
        local.done()
        assert later.wait(60) == EXIT_DONE, "engines leave when the run is done"
    return local.folder


@contextmanager
def agent_of(fleet: FleetFolder, engine: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the agent of an engine, as its job does."""
    command = [sys.executable, "-m", "rlpost.engines.engine_job", "--engine", engine]
    command += ["--run-folder", str(fleet.run), "--group", fleet.group]
    command += ["--stop-file", str(fleet.stop_path(engine))]
    with (fleet.logs / f"{engine}.log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield agent
    finally:
        agent.terminate()
        agent.wait()


def test_the_death_of_a_judge_loses_no_answer(run: Path) -> None:
    lines = read_metrics(run / "metrics.jsonl")
    trained = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in trained] == [*range(1, NUM_STEPS + 1)]
    assert sum(line["rollout/reward_lost"] + line["rollout/reward_errors"] for line in trained) == 0
    assert all(
        line["rollout/num_samples"] == 64 for line in trained if "rollout/num_samples" in line
    )
    asked = sum(line["engines/judge/num_requests"] for line in trained)
    assert asked >= NUM_STEPS * 64
    again = sum(line["engines/second/num_requests"] for line in trained)
    assert again >= NUM_STEPS * 64
    hits = [line["engines/judge/cache_hit_frac"] for line in trained]
    assert max(hits) >= 7 / 8, "8 answers share a question, in a step without an evaluation"
    events = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["event"] == "engine_lost"]
    assert [event["group"] for event in lost] == ["judge"]
    assert any(event["event"] == "recovered" and event.get("group") == "judge" for event in events)


def test_both_engines_that_joined_the_second_judge_served(run: Path) -> None:
    """The account of an engine that was killed is lost with the driver that had not written it."""
    ledger = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert {entry["group"] for entry in ledger if entry["event"] == "fleet"} == {"second"}
    assert used_of(ledger)["two"] > 0
    for engine in ("one", "two"):
        log = (FleetFolder(run, "second").logs / f"{engine}-server.log").read_text()
        assert re.search("#running-req: [1-9]", log), f"several requests at a time of {engine}"


def test_each_evaluation_beside_training_is_in_the_line_of_its_step(run: Path) -> None:
    lines = {line["step"]: line for line in read_metrics(run / "metrics.jsonl")}
    evaluated = [step for step, line in lines.items() if EVALUATED in line]
    assert evaluated == [*range(0, NUM_STEPS + 1, EVALUATED_EVERY)]
    assert all(lines[step]["time/eval_beside_s"] > 0 for step in evaluated)
    assert not any((run / "eval_weights").iterdir()), "no weights are left"
