"""Engines with GPUs of their own and on those of the trainer; a trainer rank and an engine that are
killed: real Ray, Megatron and SGLang.
"""

import os
import re
import signal
import subprocess
import sys

import pytest

from rlpost.metrics.writer import read_metrics
from rlpost.rollout.recorded import read_groups
from tests.e2e.runs import ADAPTERS, RECIPE, ROOT, process_of

NUM_STEPS = 5


def run_of(folder, *flags):
    command = [
        sys.executable,
        "-m",
        "rlpost.submit",
        RECIPE,
        "--local",
        "--run-folder",
        str(folder),
    ]
    command += [
        "--num-rollout",
        str(NUM_STEPS),
        "--eval-interval",
        str(NUM_STEPS),
        "--skip-eval-before-train",
        *flags,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(run, pattern):
    """What the run prints up to the line that matches."""
    lines = []
    for line in run.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"ended without {pattern!r}:\n{''.join(lines)}")


def engine_process(folder, index):
    """The server of an engine."""
    return process_of(folder / f"attempts/0/engine-{index}-server.log")


ASYNC = ["--rollout-mode", "fully_async"]
MODES = {"own-gpus": ASYNC, "colocated": ["--colocate"], "adapters": [*ASYNC, *ADAPTERS]}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_in_its_attempt_when_a_trainer_rank_and_an_engine_are_killed(
    assets, tmp_path, mode
):
    """The ranks are started again beside engines that stay; the engine is restarted and given the
    current weights; and every step trains every one of its samples.
    """
    folder, shares_gpus = tmp_path / "run", mode == "colocated"
    record = ["--save-debug-rollout-data", str(tmp_path / "{rollout_id}.jsonl")]
    run = run_of(folder, "--rollout-health-check-interval", "1", *record, *MODES[mode])
    try:
        printed = read_until(run, r"step 2/")
        engines = [engine_process(folder, index) for index in (0, 1)]
        process_of(folder / "attempts/0/actor-1.log").send_signal(signal.SIGKILL)
        printed += read_until(run, r"trainer recovered at step \d")
        assert [engine_process(folder, index) for index in (0, 1)] == engines
        engines[1].send_signal(signal.SIGKILL)
        printed += read_until(run, rf"step {NUM_STEPS}/")
        printed += run.stdout.readlines()
        assert run.wait(timeout=120) == 0, "".join(printed)[-6000:]
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    text = "".join(printed)
    assert "1 engines restarted, at policy version" in text
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    trained = [
        group
        for step in range(NUM_STEPS)
        for group in read_groups(str(tmp_path / "{rollout_id}.jsonl"), step)
    ]
    assert len({group.prompt_id for group in trained}) == len(trained) == NUM_STEPS * 32
    assert {len(group.samples) for group in trained} == {8}
    assert len(list((folder / "attempts").glob("[0-9]*"))) == 1, "the attempt itself never ended"
    if mode == "adapters":
        log = (folder / "attempts/0/engine-1-server.log").read_text()
        assert "Lora name=version-1," in log and f"Lora name=version-{NUM_STEPS}," in log
        assert all(line["sync/weights_bytes"] < 300_000 for line in lines)
    if shares_gpus:
        log = (folder / "attempts/0/actor-0.log").read_text()
        assert "offloaded weights" in log and "restored weights" in log
