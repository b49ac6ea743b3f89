"""``rlpost fleet``: what it submits, what it orders, and what it shows; with stand-ins of Slurm."""

import pytest

from common.run_folder import create_run_folder
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.load import dump, load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.fleet.fleet_folder import FleetFolder
from rlpost.extensions.fleet.fleet_verb import fleet_spec, main
from rlpost.extensions.fleet.fleet_view import surplus, table, used_of, views
from rlpost.extensions.fleet.job_part import FLEET_JOBS
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Lease, Orders
from slurm.arrays import engine_tasks
from slurm.queue import QueueEntry
from slurm.states import JobState
from tests.unit.slurm.stand_ins import fleet_commands

CLUSTER = {"num_gpus_per_node": 8, "rollout_num_gpus_per_engine": 4, "partition": "gpu"}


@pytest.fixture
def run(tmp_path):
    config = Config(cluster=ClusterConfig(**CLUSTER, job_name="rl"))
    return create_run_folder(tmp_path / "runs/rl", dump(config))


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins of Slurm's commands; returns the file of what was asked, and that of the queue."""
    asked, queue = tmp_path / "asked", tmp_path / "queue"
    queue.write_text("")
    sbatch = f'echo "sbatch $(env | grep -c SECRETKEY)" >>{asked}\n'
    sbatch += f"echo $((69 + $(grep -c sbatch {asked})))"
    monkeypatch.setenv("PATH", fleet_commands(tmp_path / "bin", asked, queue, sbatch))
    monkeypatch.setenv("WANDB_API_KEY", "SECRETKEY")
    return asked, queue


def call(run, *words):
    return main([str(run.root), *words])


def ready(engine, **more):
    return EngineRecord(engine, "a", EngineState.READY, 1, url="http://n1:1", host="n1", **more)


def test_engine_jobs_take_the_runs_settings_and_the_flags(run, capsys):
    assert call(run, "--engines", "3", "--dry-run", "--partition", "spot", "--time", "60") == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-2\n" in script and "--job-name=rl-fleet" in script
    assert "--partition=spot" in script and "--time=60 " in script and "--gres=gpu:4" in script
    assert "--exclusive" not in script  # another engine fits on the node
    assert f"--run-folder={run.root} " in script and "--num-gpus 4" in script
    assert not (run.root / "fleet").exists()


def test_a_profile_applies_to_the_engine_jobs(run, tmp_path, capsys):
    profile = tmp_path / "spot.toml"
    profile.write_text('[cluster]\npartition = "preempt"\nqos = "low"\ngpu_request = "none"\n')
    call(run, "--engines", "1", "--dry-run", "--cluster", str(profile))
    script = capsys.readouterr().out
    assert "--partition=preempt --qos=low" in script and "--gres" not in script


def test_a_wrong_value_names_its_flag(run):
    with pytest.raises(ConfigError, match="--time soon: write minutes"):
        call(run, "--engines", "1", "--dry-run", "--time", "soon")
    with pytest.raises(ConfigError, match="engines: 0; use 1 to"):
        call(run, "--engines", "0", "--dry-run")


def test_an_engine_larger_than_a_node_is_refused(run):
    config = Config(cluster=ClusterConfig(num_gpus_per_node=4, rollout_num_gpus_per_engine=8))
    with pytest.raises(ConfigError, match=r"--rollout-num-gpus-per-engine 8.*one node"):
        fleet_spec(run, config, 1)


def test_submitting_makes_the_secret_and_a_line_in_the_ledger(run, slurm, capsys):
    FleetFolder(run.root)
    assert call(run, "--engines", "2") == 0
    assert len(FleetFolder(run.root).secret()) == 64
    assert engine_tasks(run.ledger.read()) == ["70_0", "70_1"]
    assert slurm[0].read_text() == "sbatch 0\n", "a key reached Slurm"
    assert FleetFolder(run.root).secret() not in (run.root / "fleet/job.sbatch").read_text()
    assert "submitted 70: 2 engines" in capsys.readouterr().out


def test_a_run_that_is_done_gets_no_engines(run, slurm):
    run.ledger.append("done", step=1, weights="")
    with pytest.raises(ConfigError, match="is done"):
        call(run, "--engines", "2")
    assert not slurm[0].exists()


@pytest.fixture
def with_judge(run):
    judge = {"model": "/judge", "fleet": True, "gpus": 2, "engines": 0}
    config = load(
        [], {"cluster": {**CLUSTER, "job_name": "rl"}, "engines": {"judge": judge}}
    ).config
    run.run_json.write_text(dump(config))
    return run


def test_engines_join_the_group_that_is_named(with_judge, slurm, capsys):
    run = with_judge
    call(run, "--group", "judge", "--engines", "2", "--dry-run")
    script = capsys.readouterr().out
    assert "--job-name=rl-fleet-judge" in script and "--gres=gpu:2" in script
    assert "--num-gpus 2 --group judge" in script and f"{run.root}/fleet-judge/logs/" in script
    call(run, "--group", "judge", "--engines", "2")
    assert (run.root / "fleet-judge/job.sbatch").exists() and not (run.root / "fleet").exists()
    assert engine_tasks(run.ledger.read(), "policy") == []
    assert engine_tasks(run.ledger.read(), "judge") == ["70_0", "70_1"]
    slurm[1].write_text("70_0|RUNNING|1:00|N/A|n1|None\n70_1|PENDING|1:00|N/A||Priority\n")
    capsys.readouterr()
    call(run)
    assert capsys.readouterr().out.splitlines()[0] == "[engines.judge]"
    call(run, "--group", "judge", "--scale", "1")
    assert FleetFolder(run.root, "judge").orders() == Orders(drain=("70_1",))
    call(run, "--drain", "70_0")  # as the table without a group names it
    assert FleetFolder(run.root, "judge").orders() == Orders(drain=("70_1", "70_0"))
    FLEET_JOBS.cancel(run)
    assert FleetFolder(run.root, "judge").orders().stop


def test_a_group_without_a_fleet_is_named(with_judge):
    with pytest.raises(ConfigError, match=r"--group jugde: no such group.*did you mean 'judge'"):
        call(with_judge, "--group", "jugde", "--engines", "1")
    table = {"judge": {"model": "/judge"}}
    with_judge.run_json.write_text(dump(load([], {"engines": table}).config))
    with pytest.raises(ConfigError, match="has no engines on other jobs; add fleet = true"):
        call(with_judge, "--group", "judge", "--engines", "1")


def test_scaling_submits_what_is_missing_and_drains_what_is_too_much(run, slurm):
    call(run, "--engines", "2")
    slurm[1].write_text("70_0|RUNNING|1:00|N/A|n1|None\n70_1|PENDING|1:00|N/A||Priority\n")
    call(run, "--scale", "3")
    submitted = [entry for entry in run.ledger.read() if entry["event"] == "fleet"]
    assert [entry["engines"] for entry in submitted] == [2, 1]
    call(run, "--scale", "1")
    assert FleetFolder(run.root).orders() == Orders(drain=("70_1",))
    assert slurm[0].read_text().splitlines()[2:] == ["scancel 70_1"]


def test_draining_needs_an_engine_that_is_there(run, slurm):
    call(run, "--engines", "1")
    slurm[1].write_text("70_0|RUNNING|1:00|N/A|n1|None\n")
    with pytest.raises(ConfigError, match="--drain 71_0: no such engine; there are: 70_0"):
        call(run, "--drain", "71_0")
    call(run, "--drain", "70_0")
    assert FleetFolder(run.root).orders().says_leave("70_0")
    assert "scancel" not in slurm[0].read_text()  # it leaves by itself


def test_an_engine_is_drained_by_its_name_whatever_its_group(with_judge, slurm, capsys):
    """The table without a group shows it, so its name alone suffices."""
    run = with_judge
    call(run, "--group", "judge", "--engines", "1")
    slurm[1].write_text("70_0|RUNNING|1:00|N/A|n1|None\n")
    with pytest.raises(ConfigError, match="--drain 9_9: no such engine; there are: 70_0"):
        call(run, "--drain", "9_9")
    call(run, "--drain", "70_0")
    assert FleetFolder(run.root, "judge").orders() == Orders(drain=("70_0",))
    assert not FleetFolder(run.root).exists()


def test_engine_jobs_get_other_options_of_sbatch_and_another_gpu_type(run, capsys):
    words = ("--gpu-type", "a100", "--sbatch=--nice", "--sbatch=--gres=nvme:1")
    call(run, "--engines", "1", "--dry-run", *words)
    script = capsys.readouterr().out
    assert "#SBATCH --nice\n" in script and "gpu:a100:4,nvme:1" in script


def test_none_unsets_a_place_of_the_engine_jobs(run, capsys):
    """As in every other command; Slurm would look for a type and a partition of that name."""
    words = [f"--{name}=none" for name in ("gpu-type", "partition", "constraint", "cluster")]
    call(run, "--engines", "1", "--dry-run", *words)
    lines = [line for line in capsys.readouterr().out.splitlines() if "--output" not in line]
    head = "\n".join(line for line in lines if line.startswith("#SBATCH"))
    assert "--gres=gpu:4\n" in head and "none" not in head


def test_stopping_stops_all_and_new_engines_take_it_back(run, slurm):
    call(run, "--engines", "1")
    slurm[1].write_text("70_0|PENDING|1:00|N/A||Priority\n")
    call(run, "--stop")
    assert FleetFolder(run.root).orders().stop and "scancel 70_0" in slurm[0].read_text()
    call(run, "--engines", "1")
    assert not FleetFolder(run.root).orders().stop


def test_the_table_joins_what_slurm_agent_and_driver_say(run, slurm, capsys):
    call(run, "--engines", "2")
    folder = FleetFolder(run.root)
    folder.write_engine(ready("70_0"))
    folder.write_lease(Lease("1", 9, version=4, engines={"70_0": "serves version 4"}, host="n9"))
    run.ledger.append("fleet", attempt="0", used={"70_0": 1800.0})
    run.ledger.append("fleet", attempt="1", used={"70_0": 900.0})
    run.ledger.append("fleet", attempt="1", used={"70_0": 1800.0})
    slurm[1].write_text("70_0|RUNNING|1:00|N/A|n1|None\n70_1|PENDING|1:00|N/A||Priority\n")
    capsys.readouterr()
    call(run)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[1].split()) == "70_0 RUNNING ready serves version 4 n1 1.00 h"
    assert " ".join(lines[2].split()) == "70_1 PENDING - - - -"
    assert lines[4] == "driver: attempt 1 on n9, version 4"


def test_an_ended_job_is_shown_only_while_its_file_is_there():
    jobs = {"7_0": QueueEntry("7_0", JobState.COMPLETED)}
    assert views(jobs, [], None, Orders(), []) == []
    (left,) = views(jobs, [ready("7_0")], None, Orders(), [])
    assert not left.stays and left.job_state is JobState.COMPLETED


def test_a_preempted_engine_that_waits_in_the_queue_still_counts():
    """--scale would submit another one for it."""
    jobs = {"7_0": QueueEntry("7_0", JobState.PENDING)}
    gone = ready("7_0").next(state=EngineState.GONE, reason="signal USR2")
    (waiting,) = views(jobs, [gone], None, Orders(), [])
    assert waiting.stays
    (forgotten,) = views({}, [gone], None, Orders(), [])
    assert not forgotten.stays


def test_those_that_serve_least_are_drained_first():
    jobs = {
        name: QueueEntry(name, state)
        for name, state in (
            ("7_0", JobState.RUNNING),
            ("7_1", JobState.RUNNING),
            ("7_2", JobState.PENDING),
            ("7_10", JobState.RUNNING),
        )
    }
    lease = Lease("0", 1, engines={"7_0": "serves version 1", "7_1": "serves version 1"})
    found = views(jobs, [], lease, Orders(), [{"event": "fleet", "used": {"7_0": 5}}])
    assert [one.engine for one in found] == ["7_0", "7_1", "7_2", "7_10"]
    assert [surplus(found, number) for number in (3, 2, 1)] == [
        ["7_2"],
        ["7_2", "7_10"],
        ["7_2", "7_10", "7_1"],
    ]
    assert surplus(found, 9) == []


def test_without_a_fleet_the_table_says_how_to_start_one(run, slurm, capsys):
    call(run)
    assert "--engines N" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no fleet"):
        call(run, "--stop")


def test_broken_settings_are_named(run):
    run.run_json.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        call(run, "--engines", "1")
    assert used_of([]) == {} and "no engine" in table([], None)
