"""Whole runs on two nodes of a real Slurm: Megatron-core with TP=2 and DP=2, two SGLang engines
in one job.

The first run is not disturbed. The others lose a node, are preempted by a job of higher priority, and
resume on fewer nodes (a run that is preempted with a user signal: tests/e2e/test_fleet.py). The
generations of the first are fixed: it records them, and the other runs train on the recording. So
weights and metrics must be equal to the last bit. Engines run where a node is lost: they are
synchronised after every step and generate the evaluations. All tests are in one file, because they
share the first run.
"""

import json
import re
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.host_lists import expand
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.e2e.local_run import num_plans_of_slices
from tests.e2e.runs import (
    HF_TOKEN,
    NUM_STEPS,
    RECIPE,
    ROOT,
    RUN_DEADLINE_S,
    SAVED_EVERY,
    SETTINGS,
    TRAINING,
    WANDB_KEY,
    Run,
    comparable,
    evaluations,
    process_of,
    until_over,
)

PREEMPT_AFTER_STEP = 1


def preempt(run: Run) -> str:
    """When some steps are trained, submit a job of the high partition that takes two nodes; return
    its id.

    A rank is stopped until the run is asked to leave, which on a fast machine would end before.
    """
    until(
        lambda: (
            any(line["step"] >= PREEMPT_AFTER_STEP for line in run.metrics)
            or job_info(run.lab, run.job).state.is_over
        ),
        run.lab,
        f"step {PREEMPT_AFTER_STEP}",
        deadline_s=RUN_DEADLINE_S,
    )
    attempt = run.folder / "attempts/0"
    rank = process_of(attempt / "actor-0.log")
    rank.suspend()
    assert run.metrics[-1]["step"] < NUM_STEPS, run.logs()
    script = (
        "#!/bin/bash\n#SBATCH --partition=high --nodes=2 --exclusive --gres=gpu:8\nsrun hostname\n"
    )
    urgent = sbatch(run.lab, f"urgent-{run.job}.sbatch", script)
    until((attempt / "STOP").exists, run.lab, "the run is asked to leave")
    rank.resume()
    return urgent


def assert_equal(run: Run, undisturbed: Run) -> None:
    """The run ended as the undisturbed one."""
    assert run.events("done")[0]["weights"] == undisturbed.events("done")[0]["weights"]
    steps = [line["step"] for line in run.metrics]  # one that only trains has none before the first
    expected = comparable(undisturbed.metrics)
    assert comparable(run.metrics) == [line for line in expected if line["step"] in steps]
    assert steps[-NUM_STEPS:] == list(range(1, NUM_STEPS + 1))


def assert_preempted_once(run: Run) -> None:
    """The run resumed from the checkpoint of its preemption."""
    info = job_info(run.lab, run.job)
    assert info.num_restarts == 1, run.logs()
    assert (run.verdict(0), run.verdict(1)) == ("requeue", "done")
    (preempted,), (first, second) = run.events("preempted"), run.events("started")
    saved = [
        event["step"]
        for event in run.ledger[: run.ledger.index(preempted)]
        if event["event"] == "committed"
    ]
    assert first["step"] == 0
    assert PREEMPT_AFTER_STEP <= second["step"] == saved[-1] < NUM_STEPS


def assert_leaves_within(run: Run, *, seconds: float) -> None:
    """The stop file has Slurm's own deadline, which the grace time set; the checkpoint fits well
    before it.
    """
    stop = json.loads(run.log(0, "STOP"))
    assert float(stop["deadline"]) - stop["time"] == pytest.approx(120, abs=15)
    (event,) = run.events("preempted")
    assert event["saved"] == "checkpoint"
    assert 0 < event["seconds_from_signal"] < seconds


def test_the_run_ends_done_with_every_step_once(undisturbed):
    assert undisturbed.verdict(0) == "done"
    assert [line["step"] for line in undisturbed.metrics] == list(range(NUM_STEPS + 1))
    assert set(evaluations(undisturbed.metrics)) == {0, SAVED_EVERY, NUM_STEPS}
    events = [entry["event"] for entry in undisturbed.ledger if entry["event"] != "committed"]
    # a job may begin before sbatch has returned
    assert events[0] == "submitting" and sorted(events[1:3]) == ["attempt", "submitted"]
    assert events[3:] == ["started", "ready", "done", "verdict"]


def test_both_nodes_meet_on_the_routable_interface(undisturbed):
    agent = undisturbed.log(0, "agent-n01.log")
    for node, ip in (("n01", "10.77.0.11"), ("n02", "10.77.0.12")):
        assert re.search(rf"{node}\s+eth0\s+{re.escape(ip)}", agent), agent
    assert undisturbed.events("started")[0]["nodes"] == ["n01", "n02"]


def test_four_ranks_train_and_an_engine_on_each_node_generates(undisturbed):
    attempt = undisturbed.folder / "attempts/0"
    assert len(list(attempt.glob("actor-*.log"))) == 4
    for index, ip in enumerate(("10.77.0.11", "10.77.0.12")):
        server = (attempt / f"engine-{index}-server.log").read_text()
        assert "Prefill batch" in server
        assert "POST /generate" not in server, "it would get a line for each request"
        assert f"http://{ip}:" in (attempt / f"engine-{index}.log").read_text()


def test_after_every_step_both_engines_have_its_policy_version(undisturbed):
    seen = re.findall(r"policy version (\d+) on 2 engines", undisturbed.log(0))
    assert [int(version) for version in seen] == list(range(NUM_STEPS + 1))


def test_trainer_and_engines_agree_on_the_log_probs_of_what_was_generated(undisturbed):
    """Engines compute them while generating, the trainer while training: two programs with the same
    weights.
    """
    for line in undisturbed.metrics[1:]:
        assert line["train/rollout_logprob_abs_diff"] < 1e-4


def test_the_run_folder_is_private_and_the_secret_is_in_one_file_alone(undisturbed):
    folder = undisturbed.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = (folder / "attempts/0/secret").read_bytes().strip()
    holders = [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert [path.name for path in holders] == ["secret"]


def test_the_user_s_keys_are_in_one_private_file_and_nowhere_else(undisturbed):
    """One key is given in the environment, one on the command line.

    Searched are all files of the run's folder and, while it trains, Ray's folder, command lines and
    environments on both nodes.
    """
    holders = [
        path
        for path in undisturbed.folder.rglob("*")
        if path.is_file()
        and any(key.encode() in path.read_bytes() for key in (HF_TOKEN, WANDB_KEY))
    ]
    assert [path.name for path in holders] == ["secrets.env"]
    assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert sorted(holders[0].read_text().split()) == [
        f"HF_TOKEN={HF_TOKEN}",
        f"WANDB_API_KEY={WANDB_KEY}",
    ]
    assert [line.split()[0] for line in undisturbed.searched] == ["ray", "ray"]
    assert all(int(line.split()[1]) > 10 for line in undisturbed.searched)


def test_nothing_of_the_run_is_left_on_the_nodes(undisturbed):
    def left() -> list[str]:
        found = [
            undisturbed.lab.run(node, ["ps", "-eo", "args="]).stdout for node in ("n01", "n02")
        ]
        lines = "".join(found).splitlines()
        return [line for line in lines if not re.search(r"node_init\.py|slurmd|bindfs|^ps ", line)]

    until(lambda: not left(), undisturbed.lab, "every process of the run has ended")


@dataclass(frozen=True)
class SideBySide:
    """Two runs at the same time: on two nodes with a spare, and on the fourth."""

    loses_a_node: Run
    on_fewer_nodes: Run


@pytest.fixture(scope="module")
def runs(undisturbed: Run, lab: Lab, recordings: Path) -> SideBySide:
    """Both train on the recording of the undisturbed run; the second resumes its last checkpoint but
    one.
    """
    replay = ["--load-debug-rollout-data", str(recordings / "{rollout_id}.jsonl")]
    lost, fewer = (Run(lab, lab.shared / name) for name in ("lost-node", "fewer-nodes"))
    slices = ("--spare-nodes", "1", "--update-weight-transport", "slices")
    submit(lost, "--nodes", "2", *slices, *replay)
    shutil.copytree(undisturbed.folder, fewer.folder, symlinks=True)
    shutil.rmtree(fewer.folder / f"checkpoints/iter_{NUM_STEPS:07d}")
    submit(fewer, "--nodes", "1", "--resume", "--debug-train-only", *replay)
    return SideBySide(lost, fewer)


def submit(run: Run, *flags: str) -> None:
    command = [sys.executable, "-m", "rlpost.submit", RECIPE, *SETTINGS, *flags]
    command += ["--run-folder", str(run.folder)]
    run.job = run.lab.run("ctl", command, cwd=ROOT).stdout.split()[1]


def lose_a_node(run: Run) -> tuple[str, str]:
    """Cut the power of a node after the first step; return it and the spare node.

    The node has two of the four trainer ranks and one of the two engines.
    """
    until(lambda: len(run.metrics) > 1, run.lab, "a step is trained", deadline_s=RUN_DEADLINE_S)
    first, lost = run.events("started")[0]["nodes"]
    (spare,) = {*expand(job_info(run.lab, run.job).nodelist)} - {first, lost}
    run.lab.kill_node(lost)
    return lost, spare


def test_a_run_that_loses_a_node_gets_the_spare_within_its_attempt_and_ends_equal(
    undisturbed, runs
):
    run = runs.loses_a_node
    lost, spare = lose_a_node(run)
    until_over(run)
    assert_equal(run, undisturbed)
    assert evaluations(run.metrics) == pytest.approx(evaluations(undisturbed.metrics), abs=0.02)
    assert (job_info(run.lab, run.job).num_restarts, run.verdict(0)) == (0, "done")
    recovered = {event["role"]: event for event in run.events("recovered")}
    assert set(recovered) == {"trainer", "engine", "node"}, run.logs()
    assert (recovered["node"]["host"], recovered["node"]["replacement"]) == (lost, spare)
    print(f"recovered: {[(role, event['seconds']) for role, event in recovered.items()]}")
    # the undisturbed run gathers
    assert num_plans_of_slices(run.log(0)) >= 2


def test_a_run_of_two_nodes_resumes_on_one_with_half_the_trainer_ranks(undisturbed, runs):
    """``submit --resume`` with fewer --nodes: from the last checkpoint but one, of TP=2 and DP=2,
    the last steps are trained again by TP=2 and DP=1, on the recording alone. Only the order in
    which floating-point numbers are added differs.
    """
    run = runs.on_fewer_nodes
    begin = undisturbed.events("committed")[-2]["step"]
    until_over(run)
    first, second = run.events("started")
    assert (len(first["nodes"]), len(second["nodes"]), second["step"]) == (2, 1, begin)
    assert begin < NUM_STEPS
    assert len(list((run.folder / "attempts/1").glob("actor-*.log"))) == 2
    assert [line["step"] for line in run.metrics] == list(range(NUM_STEPS + 1))
    for ours, theirs in zip(
        run.metrics[begin + 1 :], undisturbed.metrics[begin + 1 :], strict=True
    ):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)


def test_preempted_without_a_user_signal_the_plain_sbatch_file_resumes_and_ends_equal(
    undisturbed, lab, recordings
):
    """``sbatch jobs/tiny.sbatch``: no Python of rlpost runs on the login node. The run only trains: it
    starts no engine and evaluates nothing. Engines are restarted in tests/e2e/test_fleet.py.
    """
    run = Run(lab, lab.shared / "plain")
    replay = ["--load-debug-rollout-data", str(recordings / "{rollout_id}.jsonl")]
    options = ["--parsable", "--partition=low", f"--output={lab.shared}/plain-%j.out"]
    env = {"RLPOST_PYTHON": sys.executable, "RLPOST_RUN_FOLDER": str(run.folder)}
    command = ["sbatch", *options, "jobs/tiny.sbatch", *TRAINING, *replay, "--debug-train-only"]
    run.job = lab.run("ctl", command, cwd=ROOT, env=env).stdout.strip()
    urgent = preempt(run)
    until_over(run)
    assert job_info(run.lab, urgent).state == "COMPLETED"
    assert_preempted_once(run)
    assert_equal(run, undisturbed)
    assert not list((run.folder / "attempts").rglob("engine-*"))
    assert not evaluations(run.metrics)
    assert "TERM" in run.log(0, "STOP")
    assert_leaves_within(run, seconds=60)
    assert "requeue" in Path(f"{lab.shared}/plain-{run.job}.out").read_text()
