"""Kinds of sites that no other test has, each tried once; they run with ``--on-demand`` alone.

The agents are the stubs of ``test_batch_script``. docs/cluster.md says what was seen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from common.ledger import Ledger
from slurm.client import explain_rejection
from slurm.render import render_sbatch
from slurm.states import JobState
from tests.cluster.jobs import job_info, until
from tests.cluster.lab import Lab
from tests.cluster.lab_accounting import AccountingLab, why_no_accounting
from tests.cluster.lab_config import LabOptions
from tests.cluster.test_batch_script import BLOCKER, STUB_HOME, Run, submit
from tests.settings import a_job

__all__ = ["submit"]
pytestmark = pytest.mark.on_demand
USERS = {"ann": (1, 1), "bob": (5, 60)}  # uids of daemon and games: every Debian has them
PREEMPTED = 75


@pytest.fixture(scope="module")
def accounting(slurm_available: None) -> Iterator[AccountingLab]:
    """Two nodes; QOS with limits: ``short`` refuses, ``slow`` lets wait, ``single`` counts jobs."""
    if (reason := why_no_accounting()) is not None:
        pytest.skip(reason)
    with AccountingLab(2, name=f"dbd{os.getpid()}") as cluster:
        add, limit = ("add", "qos"), "flags=DenyOnLimit"
        cluster.account(*add, "short", "maxwall=2", limit)
        cluster.account(*add, "slow", "maxwall=2")
        cluster.account(*add, "wide", "maxtrespu=gres/gpu=8", limit)
        cluster.account(*add, "single", "maxsubmitjobsperuser=1")
        cluster.account("modify", "user", "root", "set", "qos=normal,short,slow,wide,single")
        yield cluster


def rejection(lab: Lab, name: str, **values: object) -> str:
    """What sbatch says of a job, with the remedy of rlpost."""
    script = lab.shared / f"{name}.sbatch"
    script.write_text(render_sbatch(a_job(nodes=2, job_name=name, **values)))
    done = lab.run("ctl", ["sbatch", str(script)], check=False)
    assert done.returncode != 0
    return explain_rejection(done.stderr, "")


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"qos": "short", "time": "10"}, "the account or its QOS limits this job"),
        ({"qos": "wide", "time": "10"}, "the account or its QOS limits this job"),
        ({"qos": "nowhere"}, "choose --qos from"),
        ({"account": "nowhere"}, "choose --account, and --partition"),
    ],
)
def test_a_limit_of_the_database_is_named(
    accounting: AccountingLab, values: Mapping[str, object], remedy: str
) -> None:
    assert f"remedy: {remedy}" in rejection(accounting, "limited", **values)


def test_a_run_under_a_qos_is_requeued_and_completes(
    accounting: AccountingLab, submit: Callable[..., Run]
) -> None:
    run = submit(accounting, "requeue-once", qos="single")
    run.until_over(JobState.COMPLETED)
    events = [entry["event"] for entry in Ledger(run.folder / "ledger.jsonl").read()]
    assert events == ["attempt", "verdict"] * 2


def test_a_limit_that_only_delays_is_the_reason_of_a_pending_job(
    accounting: AccountingLab, submit: Callable[..., Run]
) -> None:
    run = submit(accounting, "done", qos="slow")
    reason = ["squeue", "--noheader", f"--jobs={run.job}", "--format=%r"]
    until(
        lambda: "QOSMaxWallDurationPerJobLimit" in accounting.run("ctl", reason).stdout,
        accounting,
        "the reason of the limit",
    )
    accounting.run("ctl", ["scancel", run.job])


def test_a_chain_that_the_qos_does_not_allow_is_corrected_in_the_ledger(
    accounting: AccountingLab, submit: Callable[..., Run]
) -> None:
    """One job a user: the next one is refused while this one runs."""
    run = submit(accounting, "wait-once", qos="single", requeue="chain")
    run.until_agents_run(2)
    shutil.copy(accounting.shared / "job.sbatch", run.folder)
    accounting.run("ctl", ["scancel", "--batch", "--signal=USR2", run.job])
    run.until_over(JobState.FAILED, exit_code=PREEMPTED)
    *_, last = Ledger(run.folder / "ledger.jsonl").read()
    assert last["correction"] and last["answer"] == PREEMPTED
    assert "submit the run with --resume" in last["reason"] and "QOS" in last["reason"]


def test_a_job_container_keeps_one_tmp_for_all_steps_of_a_start(
    slurm_available: None, submit: Callable[..., Run]
) -> None:
    """job_container/tmpfs: steps from outside see the job's /tmp, where Ray's session is."""
    settings = ("JobContainerType=job_container/tmpfs", "PrologFlags=Contain")
    files = (("job_container.conf", "AutoBasePath=true\nBasePath=@BASE@/containers\n"),)
    options = LabOptions(settings=settings, files=files)
    with Lab(2, name=f"jc{os.getpid()}", options=options) as lab:
        run = submit(lab, "wait-once", setup_commands=("touch /tmp/of-$SLURM_RESTART_COUNT",))
        run.until_agents_run(2)
        step = ["srun", "--overlap", f"--jobid={run.job}", "--nodes=2", "ls", "/tmp"]
        assert lab.run("ctl", step).stdout.split() == ["of-0"] * 2
        assert not [path for node in lab.nodes for path in lab.base.glob(f"nodes/{node}/tmp/of-*")]
        lab.run("ctl", ["scancel", "--batch", "--signal=USR2", run.job])
        run.until_over(JobState.COMPLETED)
        assert run.attempt(1).is_dir()


def test_a_configless_node_needs_no_file_of_slurm(
    slurm_available: None, submit: Callable[..., Run]
) -> None:
    """Preemption and requeue by commands whose configuration comes from the controller."""
    options = LabOptions(
        settings=("SlurmctldParameters=preempt_send_user_signal,enable_configless",),
        is_configless=True,
    )
    with Lab(2, name=f"cl{os.getpid()}", options=options) as lab:
        run = submit(lab, "wait-once", partition="low", options=("--export=ALL,SLURM_CONF=",))
        run.until_agents_run(2)
        blocker = lab.shared / "blocker"
        blocker.write_text(BLOCKER.format(nodes=1) + "true\n")
        lab.run("ctl", ["sbatch", str(blocker)])
        run.until_over(JobState.COMPLETED)
        assert "requeue: job" in run.log and run.attempt(1).is_dir()


def test_two_users_share_nodes_and_cannot_read_each_other(slurm_available: None) -> None:
    """Both runs complete side by side, with a requeue; run folders are closed to the other."""
    python = shutil.which("python3", path="/usr/bin")
    assert python is not None
    with Lab(2, name=f"us{os.getpid()}") as lab:
        lab.shared.chmod(0o777)
        runs: dict[str, Run] = {}
        for user, (uid, gid) in USERS.items():
            folder = lab.shared / user
            folder.mkdir(mode=0o700)
            os.chown(folder, uid, gid)
            spec = a_job(
                nodes=2,
                num_gpus_per_node=4,
                exclusive=False,
                home=str(STUB_HOME),
                python=python,
                run_folder=str(folder / "run"),
                output=f"{folder}/slurm-%j.out",
                time="10",
                driver_args=("wait-once",),
            )
            script = lab.shared / f"{user}.sbatch"
            script.write_text(render_sbatch(spec))
            sent = lab.run("ctl", [*as_user(uid, gid), "sbatch", "--parsable", str(script)])
            runs[user] = Run(lab, sent.stdout.strip(), folder / "run")
        for run in runs.values():
            run.until_agents_run(2)
        states = [job_info(lab, run.job).state for run in runs.values()]
        assert states == [JobState.RUNNING] * 2
        for user, (uid, gid) in USERS.items():
            other = next(run for name, run in runs.items() if name != user)
            for command in (["cat", str(other.attempt(0) / "secret")], ["scancel", other.job]):
                done = lab.run("ctl", [*as_user(uid, gid), *command], check=False)
                assert "denied" in done.stderr or "permission" in done.stderr.lower()
            own = runs[user].job
            lab.run("ctl", [*as_user(uid, gid), "scancel", "--batch", "--signal=USR2", own])
        for user, run in runs.items():
            run.until_over(JobState.COMPLETED)
            owners = {path.stat().st_uid for path in Path(run.folder).rglob("*")}
            assert owners == {USERS[user][0]} and run.attempt(1).is_dir()


def as_user(uid: int, gid: int) -> list[str]:
    """Words before a command of this user."""
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]
