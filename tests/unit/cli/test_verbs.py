"""Verbs on run folders, without Slurm: which run is meant, what its status says, what is
refused.
"""

import ast
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from bootstrap.agent.verdict import AttemptVerdict, write_verdict
from common.exit_codes import EXIT_PREEMPTED
from common.run_folder import RunFolder, create_run_folder
from rlpost.cli import control, outcome, runs, stack_check
from rlpost.cli.main import OF_EXTENSIONS, OTHER_NAMES, main, verbs
from rlpost.cli.runs import RUNS_DIR, find_run, job_ids
from rlpost.cli.secret_file import load_keys, secrets_path, store_keys
from rlpost.cli.stack_check import StackCheck
from rlpost.cli.submit import program_words, resume_command
from rlpost.config.checks.export_folder import Marker
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.keys import KEYS, without_keys
from rlpost.config.load import dump, load
from rlpost.config.tree import Config
from rlpost.durable.commit import checkpoint_name
from rlpost.engines.process import ServerProcess
from rlpost.errors import ConfigError
from rlpost.extensions.attach import attach_verbs as attach
from rlpost.extensions.attach.attach_verbs import dashboard_address, head_of, tunnel_command
from rlpost.extensions.attach.job_step import Inside
from rlpost.extensions.evaluating.evaluate_verb import convert
from rlpost.extensions.watching.run_status import headline, status_of
from rlpost.tasks.reward.pool import _GraderProcess
from slurm.container import Container
from slurm.queue import QueueEntry
from slurm.states import JobInfo, JobState
from tests.unit.cli.projects import make_project

ROOT = Path(__file__).parents[3]


def make_run(root, *, job_id="", age_s=0.0):
    run = create_run_folder(root, json.dumps({"rollout": {"num_rollout": 10}}))
    if job_id:
        run.ledger.append("submitted", job_id=job_id, nodes=1)
    os.utime(run.run_json, (time.time() - age_s,) * 2)
    return run


@pytest.fixture
def no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_verbs_look_for_runs_where_submit_makes_them():
    assert str(RUNS_DIR) == ClusterConfig().runs_dir


def test_the_newest_run_is_meant_when_none_is_named(tmp_path):
    for name, age_s in (("old", 200), ("new", 10), ("older", 300)):
        make_run(tmp_path / name, age_s=age_s)
    (tmp_path / "no-run").mkdir()
    assert find_run(None, tmp_path).root.name == "new"


def test_a_run_is_found_by_folder_by_name_and_by_every_job_it_had(tmp_path):
    run = make_run(tmp_path / "a", job_id="12")
    run.ledger.append("submitted", job_id="15", nodes=1)
    make_run(tmp_path / "b", job_id="16", age_s=-10)
    for word in ("a", "12", "15", str(tmp_path / "a")):
        assert find_run(word, tmp_path) == run
    with pytest.raises(ConfigError, match="there are b, a"):
        find_run("1", tmp_path)


def test_a_run_of_plain_sbatch_has_its_job_in_its_name_and_a_time_stamp_is_none(tmp_path):
    assert job_ids(make_run(tmp_path / "tiny-4711")) == ["4711"]
    assert job_ids(make_run(tmp_path / "tiny-20261120-144720")) == []
    assert job_ids(RunFolder(tmp_path / "new-4711")) == [], "a new folder is no job"


def test_status_tells_progress_from_the_folder_and_unknown_of_slurm(no_slurm, tmp_path, capsys):
    """Step, reward, pace and checkpoint come from files; the state is UNKNOWN where nobody can be
    asked.
    """
    run = make_run(tmp_path / "runs/a", job_id="12")
    lines = [{"step": 0, "eval/heldout/reward_mean": 0.1}]
    lines += [
        {"step": n, "reward/mean": n / 10, "time/step_s": 2.0, "time/tokens_per_s": 50.0}
        for n in (1, 2, 3)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "rew')
    run.ledger.append("committed", step=2, checkpoint=checkpoint_name(2))
    run.new_attempt()
    run.ledger.append("started", attempt="0", changed=["lr: 1e-06 -> 2e-06"])
    assert main(["status", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["num_steps"], found["reward"]) == (
        "UNKNOWN",
        3,
        10,
        0.3,
    )
    assert (found["eta_s"], found["tokens_per_s"], found["evals"]) == (14.0, 50.0, {"heldout": 0.1})
    assert (found["checkpoint"], found["attempt"]) == (checkpoint_name(2), "0")
    assert main(["status"]) == 3
    text = capsys.readouterr().out
    assert all(
        word in text
        for word in (
            *(str(run.root), "3/10", "UNKNOWN", "there is no squeue here", "0:14"),
            "lr: 1e-06 -> 2e-06",
        )
    )
    run.ledger.append("submitted", job_id="local-999999999", nodes=1)
    (run.attempts / "latest/verdict").write_text("failed\n")
    assert main(["status", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["eta_s"]) == ("FAILED", 3, None)


def test_status_and_list_say_why_a_run_ended_whoever_found_it_out(no_slurm, tmp_path, capsys):
    """The batch host's cause where the agents left none, and the newest attempt's alone."""
    run = make_run(tmp_path / "runs/a", job_id="local-999999999")
    run.new_attempt()
    cause = "n01, n02: the image /x.sqsh does not exist (Exited with exit code 1)\nremedy: correct --container-image"
    ended = {
        "verdict": "config",
        "answer": 78,
        "reason": "not requeued: a restart would fail in the same way",
    }
    run.ledger.append("verdict", attempt=0, cause=cause, **ended)
    assert main(["status", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["cause"], found["decision"]) == (
        "config",
        cause,
        ended["reason"],
    )
    assert main(["list"]) == 0
    assert cause.splitlines()[0] in capsys.readouterr().out
    assert main(["status"]) == 1
    shown = capsys.readouterr().out
    assert "remedy: correct --container-image" in shown and ended["reason"] in shown
    run.new_attempt()
    assert main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "", "of the attempt before"


def test_a_job_that_refused_before_its_first_attempt_says_why(tmp_path):
    """It has no attempt, no verdict and no line in the ledger: its batch script's log has the
    reason.
    """
    run = make_run(tmp_path / "a", job_id="7")
    (run.root / "slurm-7.out").write_text("batch: job 7\ncontainer: RLPOST_IMAGE is not set\n")
    status = status_of(run, "7", QueueEntry("7", JobState.FAILED, reason="NonZeroExitCode"))
    assert headline(status) == status.cause == "container: RLPOST_IMAGE is not set"
    assert status_of(run, "7", QueueEntry("7", JobState.PENDING)).cause == ""


def test_half_a_run_has_a_status(no_slurm, tmp_path, capsys):
    """Broken run.json, ledger, metrics and verdict."""
    root = tmp_path / "runs/broken"
    (root / "attempts/0").mkdir(parents=True)
    (root / "attempts/latest").symlink_to("0")
    for name in ("run.json", "ledger.jsonl", "metrics.jsonl", "attempts/0/verdict.json"):
        (root / name).write_text('{"torn')
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "broken"


def test_what_a_run_does_not_allow_is_refused_with_the_reason(no_slurm, tmp_path, capsys):
    make_run(tmp_path / "runs/here", job_id="local-1")
    for verb, word in (
        ("requeue", "on this machine"),
        ("cancel", "already ended"),
        ("tunnel", "has ended"),
    ):
        assert main([verb, "here"]) == 2
        assert word in capsys.readouterr().err
    for words, message in (
        (["exec"], "which command"),
        (["logs", "here"], "has not started"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert main(["cancle"]) == 2
    assert "did you mean 'cancel'" in capsys.readouterr().err


def test_a_finished_run_is_not_cancelled_although_slurm_calls_it_preempted(
    tmp_path, monkeypatch, capsys
):
    """Slurm 24.05 and later keep this state when a job that was preempted once has ended."""
    run = make_run(tmp_path / "run", job_id="7")
    run.ledger.append("done", step=3)
    monkeypatch.setattr(control, "queue", lambda ids: {"7": QueueEntry("7", JobState.PREEMPTED)})
    assert main(["cancel", str(run.root)]) == 2
    assert "job 7 has already ended (COMPLETED)" in capsys.readouterr().err


def test_a_local_run_is_alive_before_its_command_line_can_be_read(monkeypatch):
    """Linux shows an empty one for a moment while a program starts, and always for its own threads."""
    here = f"{runs.LOCAL}{os.getpid()}"
    assert not runs.local_is_alive(here), "another program"
    monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [])
    assert runs.local_is_alive(here)
    monkeypatch.setattr(psutil.Process, "ppid", lambda self: runs.KTHREADD)
    assert not runs.local_is_alive(here)


def test_a_run_on_this_machine_is_cancelled_by_its_attempt_and_before_there_is_one_later(
    no_slurm, tmp_path, capsys, monkeypatch
):
    """The attempt before is over: a request in its folder would be read by nobody."""
    run = make_run(tmp_path / "runs/here", job_id="local-1")
    monkeypatch.setattr(control, "local_is_alive", lambda job_id: True)
    assert main(["cancel", "here"]) == 2
    (run.new_attempt() / "verdict").write_text("requeue\n")
    assert main(["cancel", "here"]) == 2
    assert capsys.readouterr().err.count("try again in a moment") == 2
    assert not any(entry["event"] == "cancelled" for entry in run.ledger.read())
    attempt = run.new_attempt()
    assert main(["cancel", "here"]) == 0
    assert json.loads((attempt / "STOP").read_text())["reason"] == "rlpost cancel"


def test_a_run_that_nobody_would_start_again_is_not_asked_to_requeue(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", job_id="7")
    run.run_json.write_text('{"cluster": {"requeue": "never"}}')
    monkeypatch.setattr(runs, "queue", lambda ids: {"7": QueueEntry("7", JobState.RUNNING)})
    monkeypatch.setattr(
        control, "ask_to_requeue", lambda job_id: pytest.fail("it would end for good")
    )
    assert main(["requeue", str(run.root)]) == 2
    assert "--requeue never" in capsys.readouterr().err


def test_a_container_is_not_entered_under_a_name_that_is_guessed(no_slurm, tmp_path):
    """Its name holds the restarts of the job, which only the controller knows."""
    run = make_run(tmp_path / "run", job_id="7")
    run.code.mkdir()
    cluster = {"container": "pyxis", "container_image": "/images/a.sqsh", "runs_dir": "/runs"}
    run.run_json.write_text(dump(load([], {"cluster": cluster}).config))
    with pytest.raises(ConfigError, match="scontrol"):
        attach._inside(run, "7")


def plain_run(home, *, backend="pyxis"):
    """A run of plain sbatch: job 7, without a snapshot of the code in its folder."""
    run = make_run(home / "runs/tiny-7")
    cluster = {
        "container": backend,
        "container_image": "/images/a.sqsh",
        "environment": {"HF_HOME": "/models"},
    }
    run.run_json.write_text(dump(load([], {"cluster": cluster}).config))
    (home / "bootstrap").mkdir()
    return run


@pytest.mark.parametrize("backend", ["pyxis", "enroot"])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_command_in_a_run_of_plain_sbatch_starts_in_the_code_that_it_runs(
    tmp_path, monkeypatch, backend, is_recorded
):
    """As the ledger has it; without Python on the batch host, from the place of the run folder."""
    run = plain_run(tmp_path, backend=backend)
    if is_recorded:
        (tmp_path / "runs").rename(tmp_path / "elsewhere")
        run = RunFolder(tmp_path / "elsewhere/tiny-7")
        run.ledger.append("attempt", attempt=0, job_id="7", home=str(tmp_path))
    attempt = run.new_attempt()
    seen = []
    monkeypatch.setattr(
        attach,
        "running_job",
        lambda run, what_for: QueueEntry("7", JobState.RUNNING, nodelist="n1"),
    )
    monkeypatch.setattr(attach, "job_info", lambda job: JobInfo(job, JobState.RUNNING))
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda argv, env, **_: seen.append((argv, env)) or subprocess.CompletedProcess(argv, 0),
    )
    assert main(["exec", "--run", str(run.root), "ray", "status"]) == 0
    ((argv, environ),) = seen
    assert environ["RLPOST_HOME"] == environ["PYTHONPATH"] == str(tmp_path)
    text = " ".join(argv)
    assert f"{tmp_path}/slurm/enroot.py exec" in text or f"--container-workdir={tmp_path} " in text
    assert argv[-2:] == ["ray", "status"] and "HF_HOME=/models" in argv
    assert {"RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN_PATH={attempt}/secret"} <= set(argv)


def test_a_run_whose_code_is_nowhere_says_what_to_do(tmp_path, monkeypatch):
    run = plain_run(tmp_path / "home")
    run.ledger.append("attempt", attempt=0, job_id="7", home="/gone")
    (tmp_path / "home/bootstrap").rmdir()
    with pytest.raises(ConfigError, match=r"/gone does not lead to .* link the RLPOST_HOME"):
        attach.home_of(run)


def test_the_command_that_resumes_works_when_pasted_also_without_an_environment(
    tmp_path, monkeypatch
):
    (tmp_path / "python").touch()
    script = tmp_path / "rlpost"
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    words = program_words()
    assert words == [str(tmp_path / "python"), "-m", "rlpost"]
    assert resume_command(["tiny"], tmp_path, words).startswith(
        f"{tmp_path}/python -m rlpost submit"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_words() == ["rlpost"]


def test_a_library_that_is_missing_is_one_line_and_a_fault_of_our_own_is_not(monkeypatch, capsys):
    lacking = ModuleNotFoundError("No module named 'psutil'", name="psutil")
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=lacking))
    assert main(["status"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: psutil: missing in {sys.executable}") and "use " in line
    lacking.name = "rlpost.gone"
    with pytest.raises(ModuleNotFoundError):
        main(["status"])


def test_a_verb_of_another_tool_is_answered_by_the_one_of_here(capsys):
    of_extensions = {verb: f"rlpost {words}" for verb, words in OF_EXTENSIONS.items()}
    for verb, remedy in {**OTHER_NAMES, **of_extensions}.items():
        assert main([verb, "x"]) == 2 and verb not in verbs()
        assert f"use {remedy}" in capsys.readouterr().err
        first, second = remedy.split()[:2]
        assert first == "make" or second in verbs()


@pytest.mark.parametrize(("job_id", "logs"), [("7", "slurm-*.out"), ("local-7", "submitit")])
def test_a_run_that_ends_without_a_verdict_says_where_to_look(tmp_path, capsys, job_id, logs):
    run = make_run(tmp_path / "run", job_id=job_id)
    assert outcome.conclude(run, resume="rlpost submit tiny --resume") == 1
    said = capsys.readouterr().out
    assert f"see {run.root}/{logs} and {run.attempts}/latest" in said
    assert said.endswith("\nresume: rlpost submit tiny --resume\n")


def test_a_failed_run_ends_with_its_cause_its_log_and_the_command_that_resumes_it(tmp_path, capsys):
    run = make_run(tmp_path / "run", job_id="local-7")
    attempt = run.new_attempt()
    (attempt / "driver.log").write_text("12:00:00.1 INFO up\n")
    lines = "12:00:00.1 INFO up\nTraceback (most recent call last):\nValueError: no such layer"
    write_verdict(
        attempt,
        AttemptVerdict("failed", f"the driver ended with exit code 1; its last lines:\n{lines}"),
    )
    resume = resume_command(["tiny", "--wandb-key=hush", "--lr", "1e-3"], run.root)
    assert outcome.conclude(run, resume=resume) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ended: failed",
        "cause: ValueError: no such layer",
        f"log: {attempt}/driver.log",
        f"resume: rlpost submit tiny --lr 1e-3 --resume --run-folder {run.root}",
    ]
    write_verdict(attempt, AttemptVerdict("done", ""))
    run.report.mkdir(exist_ok=True)
    run.report_page.touch()
    assert outcome.conclude(run, resume=resume) == 0
    assert capsys.readouterr().out == f"report {run.report_page}\n"


@pytest.mark.parametrize("words", [["--gpu-memory", "0GB"], ["--write-gbps", "0"]])
def test_a_plan_for_hardware_that_is_none_is_refused(capsys, words):
    assert main(["plan", str(ROOT / "jobs/recipes/qwen3_4b.toml"), *words]) == 2
    assert f"error: {words[0]} 0" in capsys.readouterr().err


def test_whoever_follows_a_chain_goes_on_with_its_next_job(tmp_path, monkeypatch):
    run, asked = make_run(tmp_path / "run", job_id="7"), []

    def answer(job_ids):
        asked.extend(job_ids)
        state = {"7": JobState.COMPLETED, "8": JobState.RUNNING}
        return {job_id: QueueEntry(job_id, state[job_id]) for job_id in job_ids}

    monkeypatch.setattr(outcome, "queue", answer)
    run.ledger.append("chained", attempt=0, job_id="8")
    assert not outcome.end_check(run, "7")() and asked == ["8"]


def test_where_nothing_follows_a_run_its_submission_waits_for_the_end(
    tmp_path, monkeypatch, capsys
):
    run, alive = make_run(tmp_path / "run", job_id="local-7"), [True, True, False]
    write_verdict(run.new_attempt(), AttemptVerdict("requeue", "preempted"))
    monkeypatch.setattr(outcome, "SHOWN_EVERY_S", 0.0)
    monkeypatch.setattr(outcome, "local_is_alive", lambda job_id: alive.pop(0))
    assert outcome.wait_for_end(run, "local-7", resume="rlpost submit x") == EXIT_PREEMPTED
    assert not alive and "resume: rlpost submit x" in capsys.readouterr().out


def test_a_reader_that_ends_just_after_an_interrupt_ends_no_wait(tmp_path, monkeypatch):
    """Ctrl-C signals the whole pipeline, and the reader may end after the writer has looked."""
    run, alive = make_run(tmp_path / "run", job_id="local-7"), [True] * 3 + [False]
    run.new_attempt()
    slept, looked = iter([KeyboardInterrupt, None, None]), []

    def sleep(_):
        if (error := next(slept)) is not None:
            raise error

    def show():
        if len(alive) == 2:
            raise BrokenPipeError

    monkeypatch.setattr(outcome, "local_is_alive", lambda job_id: alive.pop(0))
    monkeypatch.setattr(outcome.time, "sleep", sleep)
    monkeypatch.setattr(outcome, "_leave_closed_pipe", lambda: looked.append(len(alive)))
    outcome.show_until_over(run, "local-7", show, started_it=True)
    assert not alive and looked.count(2) == 2
    alive += [True] * 3
    with pytest.raises(BrokenPipeError):  # without an interrupt, as of a pager that was closed
        outcome.show_until_over(run, "local-7", show, started_it=True)


def test_an_interrupt_of_that_wait_asks_the_run_to_save_and_the_next_one_leaves_it(
    tmp_path, monkeypatch, capsys
):
    run, turns = make_run(tmp_path / "run", job_id="local-7"), []
    attempt = run.new_attempt()

    def interrupted(_):
        turns.append((attempt / "STOP").exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome, "local_is_alive", lambda job_id: True)
    monkeypatch.setattr(outcome.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        outcome.wait_for_end(run, "local-7", started_it=True)
    said = capsys.readouterr().err
    assert turns == [False, True] and "stopping: the run saves" in said and "left running" in said


def test_a_recipe_that_is_a_folder_is_refused_in_one_line(no_slurm, tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}: cannot be read (Is a directory); give a TOML file\n"
    )


def test_the_help_lists_every_verb(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in verbs())


def test_a_check_shows_the_arithmetic(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_project(tmp_path / "project"))
    assert main(["check", "recipe.toml", "--nodes", "2", "--rollout-batch-size", "6"]) == 0
    lines = {line[:14].strip(): line[14:] for line in capsys.readouterr().out.splitlines()}
    assert lines["GPUs"] == "2 nodes x 4 = 8: 4 train, 2 generate"
    assert lines["trainer"] == "4 ranks = TP 1 x DP 4"
    assert lines["batch"] == "12 samples / 1 optimizer step = 12; / DP 4 = 3 a rank"


def test_the_name_of_a_set_of_prompts_stands_apart_from_its_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_project(tmp_path / "project"))
    assert (
        main(["check", "recipe.toml", "--eval-prompt-data", "held-out-2026", "prompts.jsonl"]) == 0
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("eval ")]
    assert line.split()[:3] == ["eval", "held-out-2026", "prompts.jsonl:"]


def without_the_stack(tmp_path, *words):
    """Type a command in a project; it must import neither torch nor ray nor transformers."""
    project = make_project(tmp_path / "project")
    for name in ("torch", "ray", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('heavy')")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    argv = [sys.executable, "-m", *words]
    done = subprocess.run(argv, cwd=project, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option"), [(["rlpost", "check"], []), (["rlpost.submit"], ["--dry-run"])]
)
def test_a_recipe_is_checked_without_torch(tmp_path, command, option):
    """Options of Megatron-core and SGLang included, whose names are looked up in their source."""
    given = ["--deterministic-mode", "--sglang-log-level", "error"]
    assert without_the_stack(tmp_path, *command, "recipe.toml", *option, *given).stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", [["rlpost", "check"], ["rlpost.submit"], ["rlpost.train"]])
def test_settings_are_shown_without_torch(tmp_path, command):
    done = without_the_stack(tmp_path, *command, "recipe.toml", "--nodes", "2", "--print-config")
    assert any(
        line.startswith("nodes = 2 ") and line.endswith("# the command line")
        for line in done.stdout.splitlines()
    )


def test_keys_go_into_one_file_of_the_owner_and_come_out_for_the_driver(tmp_path):
    run = make_run(tmp_path / "a")
    environ = {"HF_TOKEN": "one", "WANDB_API_KEY": "a=b c", "SGLANG_API_KEY": "sk", "PATH": "/bin"}
    store_keys(run, environ)
    assert environ == {"PATH": "/bin"}
    assert secrets_path(run).stat().st_mode & 0o777 == 0o600
    store_keys(run, {"HF_TOKEN": "two"})  # submitted again, with one of them
    driver = {"PATH": "/bin"}
    load_keys(run, driver)
    assert driver == {
        "HF_TOKEN": "two",
        "WANDB_API_KEY": "a=b c",
        "SGLANG_API_KEY": "sk",
        "PATH": "/bin",
    }
    assert without_keys(driver) == {"PATH": "/bin"}


def test_what_the_driver_starts_inherits_no_key(tmp_path, monkeypatch):
    """Router and graders; engines and actors are Ray's, which never had one."""
    started = []

    def started_with(argv, env, **_):
        started.append(env)
        raise OSError("enough")

    for name in KEYS:
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(subprocess, "Popen", started_with)
    monkeypatch.setattr(stack_check, "_has_model", lambda config: True)
    monkeypatch.setattr(stack_check, "is_installed", lambda: True)
    marker = Marker("id", "run")
    for start in (
        lambda: ServerProcess("engine", tmp_path / "log").spawn({}),
        lambda: _GraderProcess({}),
        lambda: StackCheck(Config()),
        lambda: convert(tmp_path, "model", tmp_path / "hf", marker),
    ):
        with pytest.raises(OSError, match="enough"):
            start()
    assert len(started) == 4
    assert not any("secret" in env.values() for env in started)


STARTERS = {
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call"),
    *("subprocess.check_output", "asyncio.create_subprocess_exec", "os.system", "os.popen"),
    *("asyncio.create_subprocess_shell", "multiprocessing.Process"),
}


def is_without_keys(env: ast.expr, text: str) -> bool:
    """Whether an expression is empty or made of ``without_keys``, itself or where its name is set."""
    if ast.unparse(env) == "{}" or "without_keys(os.environ)" in ast.unparse(env):
        return True
    if not isinstance(env, ast.Name):
        return False
    sources = [
        ast.unparse(each.value)
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Assign)
        and any(isinstance(name, ast.Name) and name.id == env.id for name in each.targets)
    ]
    return any("without_keys(os.environ)" in source for source in sources)


# The other packages cannot import rlpost, which knows what a key is.
STARTED_ELSEWHERE = {
    "bootstrap/links": "Ray, squeue and the driver, which reads the keys from a file of the run",
    "bootstrap/preflight": "programs of the system, and checks of this package",
    "common/build_tools.py": "the compiler, for a check of preflight",
    "common/cuda_runtime.py": "/bin/true, for a check of preflight",
    "slurm/batch": "submit takes the keys before sbatch; steps and Slurm's commands inherit the rest",
    "slurm/client.py": "Slurm's commands, for the user who has the keys",
    "slurm/container_choice.py": "srun --help",
    "slurm/enroot.py": "enroot and squeue, as slurm/batch",
    "slurm/image.py": "enroot import, as slurm/batch",
    "slurm/job_id.py": "Slurm's commands, as slurm/batch",
    "slurm/local.py": "the job on this machine; submit takes the keys before it",
    "slurm/login.py": "rlpost check, which needs HF_TOKEN, and sbatch of a file that the user calls",
    "slurm/snapshot.py": "git, with the environment that rlpost gives",
    "slurm/supervise.py": "as slurm/batch",
}


def starts(folder: str) -> Iterator[tuple[Path, str, ast.Call]]:
    """Yield the file, its text and the call of each start of a process in a package."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in STARTERS:
                yield path, text, call


def test_every_process_that_rlpost_starts_has_a_separate_environment_without_keys():
    """A process that gets no ``env`` inherits the keys of the driver or of the submitting shell."""
    started = []
    for path, text, call in starts("rlpost"):
        if path.parent.name == "inner":  # runs in a sandbox, whose environment is empty
            continue
        given = [word.value for word in call.keywords if word.arg == "env"]
        started.append(path.name)
        assert given and is_without_keys(given[0], text), (
            f"{path}:{call.lineno}: give it env=without_keys(os.environ)"
        )
    assert {"process.py", "pool.py", "images.py", "local.py"} <= set(started)


def test_the_other_packages_start_processes_only_where_the_reason_is_listed():
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("slurm", "bootstrap", "common")
        for path, _, _ in starts(folder)
    }
    listed = {
        place: {file for file in files if file.startswith(place)} for place in STARTED_ELSEWHERE
    }
    assert files == set().union(*listed.values()), "state what the new process inherits"
    assert all(listed.values()), "an entry that lists no process"


def test_without_keys_there_is_no_file_and_a_broken_key_is_refused_unseen(tmp_path):
    run = make_run(tmp_path / "a")
    store_keys(run, {"HF_TOKEN": ""})
    assert not secrets_path(run).exists()
    with pytest.raises(ConfigError, match="HF_TOKEN") as refused:
        store_keys(run, {"HF_TOKEN": "hush\nhush"})
    assert "hush" not in str(refused.value)


def test_the_head_is_the_first_node_that_the_attempt_used(tmp_path):
    run = make_run(tmp_path / "a")
    assert head_of(run, ["n1", "n2"]) == "n1"
    run.ledger.append("started", attempt="0", step=0, nodes=["n2", "n1"])
    assert head_of(run, ["n1", "n2"]) == "n2"
    assert head_of(run, ["n7"]) == "n7"  # requeued on other nodes, not started there yet


STAMP = "2026-11-20 15:17:55,224\tINFO scripts.py:1151 -- "


def say_dashboard(attempt, address):
    said = f"{STAMP}To monitor and debug Ray, view the dashboard at \n{STAMP}  {address}\n{STAMP}\n{STAMP}If it\n"
    (attempt / "ray-n1.log").write_text(said)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("127.0.0.1:20002", ("127.0.0.1", 20002)),
        ("192.0.2.2:17902", ("192.0.2.2", 17902)),  # --ray-dashboard-host 0.0.0.0
        ("[fd00::1]:17902", ("fd00::1", 17902)),
        ("http://n01.site:17902", ("n01.site", 17902)),
    ],
)
def test_the_dashboard_is_found_where_ray_has_said_it_is(tmp_path, said, found):
    run = RunFolder(tmp_path)
    attempt = run.new_attempt()
    with pytest.raises(ConfigError, match="--ray-dashboard"):
        dashboard_address(run)
    say_dashboard(attempt, said)
    assert dashboard_address(run) == found


def test_a_tunnel_goes_on_to_the_head_only_where_it_has_to():
    assert (
        tunnel_command("login", "n1", "127.0.0.1", 20002)
        == "ssh -N -L 8265:127.0.0.1:20002 -J login n1"
    )
    assert (
        tunnel_command("login", "n1", "192.0.2.2", 17902, 9000)
        == "ssh -N -L 9000:192.0.2.2:17902 login"
    )
    assert tunnel_command("login", "n1", "fd00::1", 17902) == "ssh -N -L 8265:[fd00::1]:17902 login"
    assert tunnel_command("box", None, "127.0.0.1", 20002) == "ssh -N -L 8265:127.0.0.1:20002 box"


def test_a_run_on_this_machine_has_its_dashboard_here(no_slurm, tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "runs/here", job_id="local-7")
    monkeypatch.setattr(attach, "local_is_alive", lambda job_id: job_id == "local-7")
    say_dashboard(run.new_attempt(), "127.0.0.1:20002")
    assert main(["tunnel", "here", "--login", "box.site", "--port", "9000"]) == 0
    here, elsewhere, token = capsys.readouterr().out.splitlines()
    assert here == "on this machine: http://127.0.0.1:20002"
    assert elsewhere == "from another: ssh -N -L 9000:127.0.0.1:20002 box.site"
    assert "http://localhost:9000" in token and "attempts/0/secret" in token
    assert main(["tunnel", "here", "--port", "70000"]) == 2
    assert "--port 70000: a port, 1 to 65535" in capsys.readouterr().err


def test_what_pyxis_ignores_beside_a_running_container_is_not_shown(tmp_path, capfd):
    """One line per node on the normal path; all other errors and the exit code are passed on."""
    notice = "pyxis: ignoring --container-mounts when attaching to a running container"
    text = f"echo out; echo '1: {notice}' >&2; echo 'slurmstepd: {notice}' >&2; printf half >&2; exit 7"
    inside = Inside(tmp_path, tmp_path, Container("pyxis", "/a.sqsh"))
    assert attach._run(["sh", "-c", text], inside) == 7
    assert capfd.readouterr() == ("out\n", "half")
