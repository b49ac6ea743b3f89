"""Every end of an attempt has an exit code and a report."""

import asyncio
import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.attempt import CAUSE_FILE
from common.cluster import Cluster, Node
from common.exit_codes import EXIT_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from common.run_folder import RunFolder, create_run_folder
from rlpost.config.load import dump, load
from rlpost.config.tree import Config
from rlpost.driver import driver
from rlpost.driver.checkpoints import Checkpoints
from rlpost.durable.ownership import claim
from rlpost.durable.state import RunState
from rlpost.errors import ConfigError, Hang, Preempted, RlpostError
from rlpost.observe.samples import FIXED_NAME
from rlpost.observe.writer import read_metrics
from rlpost.types import Sample, SampleGroup, ScoredSample

TINY = Path(__file__).parents[3] / "assets/tiny"
ENDS = [
    (None, EXIT_DONE),
    (Preempted("SIGUSR2"), EXIT_PREEMPTED),
    (ConfigError("no such model"), EXIT_CONFIG),
    (RlpostError("an engine is gone"), driver.EXIT_FAILED),
]


def test_a_stop_counts_even_if_a_full_disk_keeps_it_out_of_the_ledger(
    tmp_path, monkeypatch, caplog
):
    config = load([], {"rollout": {"num_rollout": 3}}).config
    run = create_run_folder(tmp_path / "run", dump(config))

    async def attempt(config, run, cluster, stop, also):
        run.ledger.path.mkdir()  # nothing can be appended to it
        raise Preempted("SIGUSR2")

    monkeypatch.setattr(driver, "_attempt", attempt)
    monkeypatch.setattr(driver, "try_to_write_report", lambda run: None)
    assert (
        driver.drive(config, run, Cluster("10.0.0.1:6379", str(tmp_path), (), 20000, 100))
        == EXIT_PREEMPTED
    )
    assert "could not be written to the ledger: preempted" in caplog.text


@pytest.mark.parametrize(("error", "code"), ENDS)
def test_every_end_of_an_attempt_has_its_exit_code_and_a_report(error, code, tmp_path, monkeypatch):
    config = load([], {"rollout": {"num_rollout": 3}}).config
    run = create_run_folder(tmp_path / "run", dump(config))

    async def attempt(config, run, cluster, stop, also):
        run.ledger.append("started", attempt="0", step=0, nodes=["n01"])
        run.metrics.write_text(json.dumps({"step": 1, "reward/mean": 0.25}) + "\n")
        if error is not None:
            raise error

    monkeypatch.setattr(driver, "_attempt", attempt)
    cluster = Cluster("10.0.0.1:6379", str(tmp_path), (), 20000, 100)
    assert driver.drive(config, run, cluster) == code
    page = (run.report / "report.html").read_text()
    assert "1 / 3" in page and "0.250" in page
    assert ("preempted: SIGUSR2" in page) == isinstance(error, Preempted)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE]
)
def test_failing_storage_ends_an_attempt_with_a_message_and_no_traceback(
    tmp_path, monkeypatch, caplog, number
):
    config = load([], {"rollout": {"num_rollout": 3}}).config
    run = create_run_folder(tmp_path / "run", dump(config))

    async def attempt(config, run, cluster, stop, also):
        raise OSError(number, os.strerror(number), "/runs/a/file")

    monkeypatch.setattr(driver, "_attempt", attempt)
    cluster = Cluster("10.0.0.1:6379", str(tmp_path), (), 20000, 100)
    assert driver.drive(config, run, cluster) == driver.EXIT_FAILED
    assert f"/runs/a/file: {os.strerror(number)}; " in caplog.text
    assert "Committed checkpoints and the journal are intact" in caplog.text


@pytest.mark.parametrize(
    ("owner", "is_ours"), [(3, True), ("3.2", True), (4, True), ("4.1", False), (5, False)]
)
def test_a_stop_of_an_attempt_that_a_newer_one_replaced_is_not_in_the_ledger(
    tmp_path, monkeypatch, owner, is_ours
):
    """Attempt 4 is stopped. With an older owner, it had no time to claim the folder."""
    config = load([], {"rollout": {"num_rollout": 3}}).config
    run = create_run_folder(tmp_path / "run", dump(config))
    claim(run.checkpoints, f"{owner} of {run.root}")

    async def attempt(config, run, cluster, stop, also):
        raise Preempted("SIGUSR2")

    monkeypatch.setattr(driver, "_attempt", attempt)
    cluster = Cluster("10.0.0.1:6379", str(run.attempts / "4"), (), 20000, 100)
    assert driver.drive(config, run, cluster) == (EXIT_PREEMPTED if is_ours else EXIT_CONFIG)
    assert [entry["event"] for entry in run.ledger.read()] == (["preempted"] if is_ours else [])
    assert (run.report / "report.html").exists() == is_ours


def test_a_hanging_report_does_not_delay_the_end_of_an_attempt(tmp_path, monkeypatch, caplog):
    config = load([], {"rollout": {"num_rollout": 3}}).config
    run, answers = create_run_folder(tmp_path / "run", dump(config)), threading.Event()

    async def attempt(config, run, cluster, stop, also):
        return None

    monkeypatch.setattr(driver, "_attempt", attempt)
    monkeypatch.setattr(driver, "LAST_REPORT_S", 0.1)
    monkeypatch.setattr(driver, "try_to_write_report", lambda run: answers.wait(20))
    try:
        assert (
            driver.drive(config, run, Cluster("10.0.0.1:6379", str(tmp_path), (), 20000, 100))
            == EXIT_DONE
        )
    finally:
        answers.set()
    assert "the report was not written" in caplog.text


def test_the_journal_is_not_used_with_a_prompt_file_that_has_changed(tmp_path, caplog):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "a"}\n' * 11)
    config = load([], {"rollout": {"prompt_data": [str(prompts)]}}).config

    checkpoints = Checkpoints(config.checkpoint, tmp_path, committed=lambda step, path: None)

    def resumed():
        journal = asyncio.run(driver._journal(config, checkpoints, None, RunState(), {}))
        found = len(journal.waiting)
        journal.append_group(SampleGroup(0, ()), wanted=False)
        journal.close()
        return found

    assert [resumed(), resumed()] == [0, 1]
    prompts.write_text('{"input": "a"}\n' * 9)
    assert resumed() == 0
    assert "the files of --prompt-data have changed since" in caplog.text


class Reading:
    """Stages whose prompts are read until released; a stop is requested before that."""

    def __init__(self, stop_file):
        self.stop_file, self.released = stop_file, threading.Event()

    def read_prompts(self):
        self.stop_file.write_text('{"reason": "preempted"}')
        self.released.wait()

    @property
    def generation(self):
        return self

    tokenizer = SimpleNamespace(decode=lambda token_ids: "")

    async def close(self):
        pass


def test_a_stop_does_not_wait_for_prompts_that_are_being_read(tmp_path, monkeypatch):
    """Indexing 10 million rows on a slow file system takes minutes; a preempted run has seconds."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "1 + 1"}\n')
    rollout = {"prompt_data": [str(data)], "num_rollout": 3}
    config = load([], {"checkpoint": {"hf_checkpoint": str(TINY)}, "rollout": rollout}).config
    run = create_run_folder(tmp_path / "run", dump(config))
    run.metrics.write_text('{"step": 1, "time/step_s": 30.5}\n{"step": 2, "time/step_s": 10.0}\n')
    nodes = (Node("n1", "10.0.0.1", "lo", 0),)
    cluster = Cluster("10.0.0.1:6379", str(run.new_attempt()), nodes, 20000, 100)
    stages = Reading(Path(cluster.stop_file))
    monkeypatch.setattr(driver, "choose_mode", lambda config: lambda *given, **named: stages)
    monkeypatch.setattr(driver, "try_to_write_report", lambda run: None)
    giving_up = threading.Timer(60, stages.released.set)
    giving_up.start()
    try:
        assert driver.drive(config, run, cluster) == EXIT_PREEMPTED
        started = next(entry for entry in run.ledger.read() if entry["event"] == "started")
        assert started["gpus"] == {"per_node": 8, "trainer": 8, "engines": 1, "groups": {}}
        assert started["again"] == {"steps": 2, "step_s": 40.5}, (
            "earlier attempts trained them, none saved them"
        )
        assert not stages.released.is_set(), "the run waited for its prompts"
    finally:
        giving_up.cancel()
        stages.released.set()


@pytest.mark.parametrize("call", ["claim", "newest"])
def test_storage_that_hangs_at_startup_is_named_after_the_deadline(
    call, tmp_path, monkeypatch, caplog
):
    released = threading.Event()
    checkpoint = {"hf_checkpoint": str(TINY), "save_deadline_s": 0.5}
    config = load([], {"checkpoint": checkpoint, "rollout": {"num_rollout": 3}}).config
    run = create_run_folder(tmp_path / "run", dump(config))
    nodes = (Node("n1", "10.0.0.1", "lo", 0),)
    cluster = Cluster("10.0.0.1:6379", str(run.new_attempt()), nodes, 20000, 100)
    monkeypatch.setattr(Checkpoints, call, lambda *given: released.wait(60))
    monkeypatch.setattr(driver, "try_to_write_report", lambda run: None)
    try:
        assert driver.drive(config, run, cluster) == driver.EXIT_FAILED
    finally:
        released.set()
    assert "(--save-deadline-s): the storage hangs; repair the storage" in caplog.text


class Hanging:
    """Stages whose ranks hang."""

    def read_prompts(self):
        pass

    async def start(self, checkpoint):
        raise Hang(
            "train_step hangs because of actor-2 on n03", {"call": "train_step", "ranks": [2]}
        )

    @property
    def generation(self):
        return self

    tokenizer = SimpleNamespace(decode=lambda token_ids: "")

    async def close(self):
        pass


def test_a_hang_fails_the_attempt_and_its_ranks_are_in_the_ledger(tmp_path, monkeypatch, caplog):
    checkpoint = {"hf_checkpoint": str(TINY)}
    prompts = tmp_path / "data.jsonl"
    prompts.write_text('{"input": "1 + 1"}\n')
    rollout = {"prompt_data": [str(prompts)]}
    config = load([], {"checkpoint": checkpoint, "rollout": rollout}).config
    run = create_run_folder(tmp_path / "run", dump(config))
    nodes = (Node("n1", "10.0.0.1", "lo", 0),)
    cluster = Cluster("10.0.0.1:6379", str(run.new_attempt()), nodes, 20000, 100)
    monkeypatch.setattr(driver, "choose_mode", lambda config: lambda *given, **named: Hanging())
    monkeypatch.setattr(driver, "try_to_write_report", lambda run: None)
    assert driver.drive(config, run, cluster) == driver.EXIT_FAILED
    hang = run.ledger.read()[-1]
    assert (hang["event"], hang["call"], hang["ranks"]) == ("hang", "train_step", [2])
    assert "train_step hangs because of actor-2 on n03" in caplog.text
    cause = Path(cluster.attempt_dir) / CAUSE_FILE
    assert cause.read_text() == "train_step hangs because of actor-2 on n03\n"


def test_a_metrics_line_goes_to_the_mirrors_and_evaluation_answers_to_a_file(tmp_path):
    answer = ScoredSample(Sample(0, 0, (104, 105), (1,), (-0.5,), "four", "stop", 0), 1.0)
    answered = [{"aime": [SampleGroup(0, (answer,))]}, {}]
    stages = SimpleNamespace(
        generation=SimpleNamespace(
            take_answered=lambda step: answered.pop(0),
            tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))),
        )
    )
    mirrored = []
    run = RunFolder(tmp_path)
    run.report.mkdir()
    samples, metrics = driver._writers(
        Config(), run, stages, {}, lambda *line: mirrored.append(line), lambda: None
    )
    for step in (20, 21):
        metrics.write(step, {"train/loss": 0.5})
    samples.close()
    assert mirrored == [(20, {"train/loss": 0.5}), (21, {"train/loss": 0.5})]
    (line,) = read_metrics(run.report / FIXED_NAME)
    (kept,) = line["samples"]
    assert (line["step"], kept["set"], kept["prompt"], kept["answer"]) == (20, "aime", "hi", "four")
