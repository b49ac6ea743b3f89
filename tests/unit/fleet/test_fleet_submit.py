"""A recipe that asks for a fleet: what is submitted with the run, and what ends with it."""

import errno

import pytest

from common.run_folder import RunFolder
from rlpost.cli import control
from rlpost.cli.check import _make_jobs
from rlpost.cli.control import cancel_main
from rlpost.config import extensions
from rlpost.config.load import load
from rlpost.errors import ConfigError
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_jobs import engine_settings
from rlpost.extensions.fleet.job_part import FleetJobs
from rlpost.extensions.watching.report.write import write_report
from rlpost.submit import main
from slurm.arrays import engine_tasks
from tests.unit.slurm.stand_ins import fleet_commands

ASKED = ("--engines", "3", "--engine-partition", "preempt", "--engine-time", "60")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins of Slurm's commands; returns the file of what was asked, and that of the queue."""
    asked, queue = tmp_path / "asked", tmp_path / "queue"
    asked.write_text("")
    queue.write_text("")
    sbatch = f'echo "sbatch $(basename "${{!#}}")" >>{asked}\n'
    sbatch += (
        f"[ -e {tmp_path}/refuses ] && grep -q sbatch.*sbatch <(tr -d '\\n' <{asked}) && "
        "{ echo 'sbatch: error: no' >&2; exit 1; }\n"
    )
    sbatch += f"echo $((69 + $(grep -c sbatch {asked})))"
    monkeypatch.setenv("PATH", fleet_commands(tmp_path / "bin", asked, queue, sbatch))
    return asked, queue


def submit(project, *more):
    assert main(["recipe.toml", "--run-folder", str(project / "runs/one"), *ASKED, *more]) == 0
    return RunFolder(project / "runs/one")


def test_engine_jobs_are_submitted_with_the_run_and_start_after_it(project, slurm, capsys):
    run = submit(project)
    assert engine_tasks(run.ledger.read()) == ["71_0", "71_1", "71_2"]
    script = (run.root / "fleet/job.sbatch").read_text()
    assert "#SBATCH --array=0-2\n#SBATCH --dependency=after:70\n" in script
    assert "--partition=preempt" in script and "--time=60 " in script
    assert "--partition=preempt" not in run.script.read_text()
    assert "submitted 71: 3 engine jobs of its fleet" in capsys.readouterr().out


def test_a_ledger_that_cannot_be_read_costs_the_engines_and_not_the_submission(
    project, slurm, capsys, monkeypatch
):
    def stale(ledger):
        raise OSError(errno.ESTALE, "Stale file handle")

    real = FleetJobs.submit_optional

    def after_the_submission(*args):
        with monkeypatch.context() as patched:
            patched.setattr("common.ledger.Ledger.read", stale)
            real(*args)

    monkeypatch.setattr(FleetJobs, "submit_optional", after_the_submission)
    submit(project)
    said = capsys.readouterr()
    assert "submitted 70" in said.out and "the engine jobs were not submitted" in said.err
    assert f"rlpost fleet {project}/runs/one --engines N submits N" in said.err


def test_a_check_asks_slurm_for_no_engines_of_the_current_folder(project, slurm, monkeypatch):
    run = submit(project)
    slurm[0].write_text("")
    monkeypatch.chdir(run.root)
    _make_jobs(load([], {"checkpoint": {"hf_checkpoint": "m"}, "fleet": {"engines": 2}}).config)
    assert not slurm[0].read_text()


def test_a_dry_run_submits_no_engines_and_says_so(project, slurm, capsys):
    submit(project, "--dry-run")
    assert "3 engine jobs of its fleet" in capsys.readouterr().err
    assert not slurm[0].read_text() and not (project / "runs").exists()


def test_a_resumed_run_submits_the_engines_that_are_missing(project, slurm):
    submit(project)
    slurm[1].write_text("70|COMPLETED|1:00|N/A||None\n71_0|RUNNING|1:00|N/A|n1|None\n")
    run = submit(project, "--resume")
    assert engine_tasks(run.ledger.read()) == ["71_0", "71_1", "71_2", "73_0", "73_1"]


def test_a_run_whose_engines_are_refused_is_submitted_all_the_same(project, slurm, capsys):
    (project / "refuses").write_text("")
    run = submit(project)
    assert not engine_tasks(run.ledger.read())
    error = capsys.readouterr().err
    assert "3 engine jobs of its fleet were not submitted" in error and "--engines 3" in error


def test_without_slurm_a_fleet_is_refused_before_anything_is_made(project, capsys):
    assert main(["recipe.toml", "--local", *ASKED]) == 2
    assert "--engines 3: --local excludes Slurm" in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_cancelling_a_run_ends_its_engine_jobs(project, slurm):
    run = submit(project)
    slurm[1].write_text(
        "70|RUNNING|1:00|N/A|n1|None\n71_0|RUNNING|1:00|N/A|n2|None\n"
        "71_1|PENDING|1:00|N/A||Priority\n71_2|COMPLETED|1:00|N/A|n3|None\n"
    )
    write_report(run)
    assert ">in the queue<" in run.report_page.read_text()
    assert cancel_main([str(run.root)]) == 0
    assert ">cancelled<" in run.report_page.read_text(), "no other process writes it again"
    assert slurm[0].read_text().splitlines()[2:] == ["scancel 70", "scancel 71"]
    assert FleetFolder(run.root).orders().stop


def test_engine_jobs_of_a_run_end_without_the_extension_that_submitted_them(
    project, slurm, monkeypatch
):
    run = submit(project)
    run.ledger.append("fleet", array="72;gpu", engines=1, group="judge")
    slurm[1].write_text(
        "70_4|RUNNING|1|N/A|n1|None\n71_1|PENDING|1|N/A||None\n72_0|RUNNING|1|N/A||None\n"
    )
    monkeypatch.setattr(extensions, "extensions", lambda: ())
    monkeypatch.setattr(
        control, "job_ids", lambda run: ["70_4"]
    )  # sbatch --array: 70_5 is another run
    monkeypatch.setattr(control, "newest_job", lambda run: "70_4")
    assert cancel_main([str(run.root)]) == 0
    commands = slurm[0].read_text().splitlines()[2:]
    assert commands == ["scancel 70_4", "scancel 71", "scancel --clusters=gpu 72"]


def test_a_run_is_not_cancelled_while_slurm_does_not_answer(project, slurm):
    run = submit(project)
    squeue = slurm[0].parent / "bin/squeue"
    squeue.write_text("#!/bin/bash\necho 'squeue: error: no route' >&2\nexit 1\n")
    with pytest.raises(ConfigError, match="no route; nothing was cancelled"):
        cancel_main([str(run.root)])
    assert "cancelled" not in [entry["event"] for entry in run.ledger.read()]


def test_flags_come_before_the_table_of_the_fleet_and_that_before_the_run():
    given = {"fleet": {"engine_partition": "a", "engine_qos": "low"}, "cluster": {"qos": "high"}}
    cluster = engine_settings(load([], given).config, {"partition": "b"}).cluster
    assert (cluster.partition, cluster.qos) == ("b", "low")
    plain = load([], {}).config
    assert engine_settings(plain) is plain
