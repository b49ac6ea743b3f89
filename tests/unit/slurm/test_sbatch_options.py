"""Options of sbatch that a site adds: refused only where they collide with what the job states."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.run_folder import RunFolder
from rlpost.cli.check import check_problems
from rlpost.cli.job import job_spec
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.agents.sandbox.jobs import SERVER, sandbox_spec
from rlpost.extensions.fleet.fleet_jobs import engine_settings, fleet_spec
from slurm.arrays import FleetSpec, SandboxSpec
from slurm.errors import SpecError
from slurm.render import render_conversion, render_fleet, render_look, render_sandbox, render_sbatch
from slurm.sbatch_options import OF_SETTINGS, Job, word_problem
from slurm.spec import JobSpec
from tests.settings import a_job

SITE = ("--licenses=site:8", "--comment=it's 8 # a", "--nice", "--wckey=rl")
JOB = Job(is_exclusive=True, gpu_request="gres", requeue="requeue")
TASK = a_job(home="/h", python="/p", run_folder="/r", sbatch=SITE, output="/r/log")
TYPED = "--gres=gpu:h100:8"


def words_of(text: str) -> list[str]:
    return text.split()


# Every option of sbatch: the table common_options of src/common/slurm_opt.c, Slurm 24.11.5.
OF_24_11 = words_of(
    """
account acctg-freq array autocomplete batch bb bbf begin chdir cluster cluster-constraint clusters
comment constraint container container-id context contiguous core-spec cores-per-socket cpu-freq
cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude exclusive
export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input job-name
kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres oom-kill-step open-mode output
overcommit oversubscribe parsable partition prefer priority profile propagate qos quiet reboot
requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches
tasks-per-node test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
usage use-min-nodes verbose version wait wait-all-nodes wckey wrap
"""
)
SINCE_24_11 = words_of(
    """
consolidate-segments container-type external mem-update resources spread-segments
"""
)  # in 26.05.3, which has all of 24.11.5

REFUSED = {
    "a job has one task on each node; use --nodes": (
        "ntasks ntasks-per-gpu ntasks-per-node ntasks-per-tres tasks-per-node"
    ),
    "a job runs as the user who submits it; leave the option out": "gid uid",
    "a run is one job; use rlpost sweep": "array",
    "read the cluster where they look for its jobs; export SBATCH_CLUSTERS=": "cluster clusters",
    "the job changes to the folder of its code; use --runs-dir": "chdir",
    "sbatch would answer without submitting anything": "autocomplete help usage version",
    "the job states --parsable itself; leave the option out": "parsable",
    "sbatch would not print the id of the job": "quiet",
    "Slurm would start no batch script": "external",
    "one log for output and errors": "error",
    "the job states --output itself; leave the option out": "output",
    "the job states --open-mode itself; leave the option out": "open-mode",
    "use --setup-commands": "wrap",
    "use --container and --container-image": "container container-id container-type",
    "use --environment, or export SBATCH_EXPORT=NONE": "export export-file get-user-env",
    "the job states --nodes itself; use --nodes and --spare-nodes": "nodes",
    "without spare nodes a run needs all of its nodes; use --spare-nodes": "no-kill",
    "the job states --requeue itself; use --requeue": "requeue",
    "the job states --no-requeue itself; use --requeue": "no-requeue",
    "the job states --signal itself; use --signal-lead-s": "signal",
    "sbatch would submit nothing; use rlpost submit --test-only": "test-only",
    "use rlpost submit --wait": "wait",
    "the job requests whole nodes with all their memory; use --exclusive false": (
        "exclusive mem mem-per-cpu mem-per-gpu oversubscribe"
    ),
    "the job states --gres itself; use --num-gpus-per-node and --gpu-type, or --gpu-request none": (
        "gpus gpus-per-node gpus-per-socket gpus-per-task"
    ),
    **{
        f"the job states --{option.name} itself; use --{option.name}": option.name
        for option in OF_SETTINGS
    },
}
PASSED = words_of(
    """
acctg-freq batch bb bbf begin cluster-constraint comment consolidate-segments context contiguous
core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution extra extra-node-info gpu-bind gpu-freq gres gres-flags hint hold ignore-pbs input
kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mem-update mincpus network nice
nodefile nodelist ntasks-per-core ntasks-per-socket oom-kill-step overcommit prefer priority profile
propagate reboot resources resv-ports sockets-per-node spread-job spread-segments stepmgr switches
thread-spec threads-per-core time-min tmp tres-bind tres-per-task use-min-nodes verbose
wait-all-nodes wckey
"""
)
"""Options that collide with nothing that a run with the default settings states."""


def scripts(task: JobSpec) -> list[str]:
    """The batch file of each kind of job."""
    server = replace(task, gpu_request="none", exclusive=False)
    return [
        render_sbatch(replace(task, nodes=4, spare_nodes=1, segment=5, requeue="chain")),
        render_fleet(FleetSpec(task, 2, after="7")),
        render_sandbox(SandboxSpec(server, 2, places=4, module=SERVER, memory_mib=9, after="7")),
        render_conversion(replace(task, gpu_request="gpus-per-node", requeue="never"), "/save"),
        render_look(task),
    ]


def stated(script: str) -> set[str]:
    """Names of the options in the #SBATCH lines of a batch file."""
    lines = re.findall(r"(?m)^#SBATCH (.*)$", script)
    return {name for line in lines for name in re.findall(r"(?:^| )--([a-z-]+)", line)}


def test_every_option_of_sbatch_is_passed_or_refused_with_its_reason() -> None:
    """An option of a new version stands in neither table, and this fails."""
    refused = {name: reason for reason, names in REFUSED.items() for name in names.split()}
    assert not set(refused) & set(PASSED)
    assert sorted({*refused, *PASSED}) == sorted({*OF_24_11, *SINCE_24_11})
    for name in PASSED:
        assert word_problem(f"--{name}=1", JOB) == ""
        assert f"#SBATCH --{name}" in render_sbatch(a_job(sbatch=(f"--{name}",))) or name == "gres"
    for name, reason in refused.items():
        assert reason in word_problem(f"--{name}=1", JOB), name


def test_a_refusal_for_what_the_job_states_is_true() -> None:
    """Each option that some job states is refused there, or stated after that of the site; and no
    message says that a job states an option that none does."""
    by_jobs = {name for script in scripts(replace(TASK, sbatch=())) for name in stated(script)}
    assert len(by_jobs) > 15
    # gres is merged, dependency and GPUs depend on settings, the others come last in their jobs
    assert by_jobs & set(PASSED) == {"cpus-per-task", "dependency", "gres"}
    on_the_command_line = {"parsable"}
    claimed = {
        name
        for name in (*OF_24_11, *SINCE_24_11)
        if f"states --{name} itself" in word_problem(f"--{name}=1", JOB)
    }
    whole = {"account", "partition", "qos", "reservation", "constraint", "segment", "exclude"}
    assert claimed <= by_jobs | on_the_command_line | whole


@pytest.mark.parametrize("request_", ["gres", "gpus-per-node", "none"])
@pytest.mark.parametrize(
    ("word", "has_gpus"),
    [
        *((f"--{name}=h100:8", True) for name in ("gpus", "gpus-per-node", "gpus-per-socket")),
        ("--gpus-per-task=8", True),
        ("--gpus-per-t=8", True),
        (TYPED, True),
        ("--gres=nvme:1,gpu:8", True),
        ("--gres=shard:4", True),
        ("--gres=gres/mps:50", True),
        ("--tres-per-task=gres/gpu:h100:4", True),
        ("--tres-per-task=cpu:8,gres/gpu=4", True),
        ("--tres-per-task=cpu:8,license/site:1", False),
        ("--gres=nvme:1,gpu_memory:4", False),
    ],
)
def test_a_request_for_gpus_collides_with_one_of_the_job_alone(
    word: str, has_gpus: bool, request_: str
) -> None:
    problem = word_problem(word, Job(is_exclusive=True, gpu_request=request_, requeue="requeue"))
    collides = has_gpus and request_ != "none"
    assert (f"the job states --{request_} itself" in problem) is collides
    assert bool(problem) is collides
    if not problem:
        script = render_sbatch(a_job(gpu_request=request_, sbatch=(word,)))  # type: ignore[arg-type]
        assert word.partition("=")[2] in script


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "--gres=gpu:8\n"),
        ({"gpu_type": "h100"}, "--gres=gpu:h100:8\n"),
        ({"gpu_type": "1g.10gb+me"}, "--gres=gpu:1g.10gb+me:8\n"),
        ({"gpu_type": "h100", "gpu_request": "gpus-per-node"}, "--gpus-per-node=h100:8\n"),
        ({"sbatch": ("--gres=nvme:1", "--gres=tmpfs:4")}, "--gres=gpu:8,nvme:1,tmpfs:4\n"),
        (
            {"gpu_request": "gpus-per-node", "sbatch": ("--gres=nvme:1",)},
            "--gpus-per-node=8 --gres=nvme:1\n",
        ),
        ({"gpu_request": "none", "sbatch": (TYPED,)}, f"--mem=0 {TYPED}\n"),
    ],
)
def test_a_type_and_further_resources_are_one_request(values: dict[str, Any], line: str) -> None:
    script = render_sbatch(a_job(**values))
    assert line in script and script.count("--gres") == line.count("--gres")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpu_type": "h100:8"}, r"^gpu_type: 'h100:8'; give a type as sinfo"),
        (
            {"gpu_type": "h100", "gpu_request": "none"},
            r"^gpu_type: 'h100' has no effect with --gpu-request none; .*--sbatch=--gres=gpu:h100:8",
        ),
        (
            {"requeue": "chain", "sbatch": ("--dependency=afterok:7",)},
            "with --requeue chain the job states --dependency itself; submit it when",
        ),
        ({"segment": 3}, "^segment: 3 does not divide the 1 nodes"),
    ],
)
def test_a_setting_that_cannot_act_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        a_job(**values)


def test_a_run_may_wait_for_another_job() -> None:
    script = render_sbatch(a_job(sbatch=("--dependency=afterok:7",)))
    assert script.count("--dependency") == 1 and "#SBATCH --dependency=afterok:7\n" in script


def config_of(**cluster: Any) -> Config:
    fleet = cluster.pop("fleet", {})
    sandbox = cluster.pop("sandbox", {})
    return Config.model_validate({"cluster": cluster, "fleet": fleet, "sandbox": sandbox})


def engine_script(config: Config, folder: Path) -> str:
    return render_fleet(fleet_spec(RunFolder(folder), engine_settings(config), 1, after="7"))


def sandbox_script(config: Config, folder: Path) -> str:
    return render_sandbox(sandbox_spec(RunFolder(folder), config, after="7"))


OF_THE_RUN = ("--dependency=afterok:7", "--nodelist=n[1-4]", "--gres=nvme:1", "--wckey=rl")


def test_other_jobs_inherit_neither_gpus_nor_dependencies_of_the_run(tmp_path: Path) -> None:
    """Nor the features of GPU nodes in another partition, nor the blocks of several nodes."""
    config = config_of(
        gpu_type="h100", nodes=4, segment=2, constraint="ib", sbatch=[*OF_THE_RUN, "--gpu-freq=low"]
    )
    engine, server = engine_script(config, tmp_path), sandbox_script(config, tmp_path)
    for script in (engine, server):
        assert "--wckey=rl" in script and "--dependency=after:7" in script
        assert not stated(script) & {"segment", "nodelist"} and "afterok" not in script
        assert "--constraint=ib" in script
    assert "--gres=gpu:h100:1,nvme:1" in engine and "--gpu-freq=low" in engine
    assert not stated(server) & {"gres", "gpu-freq"}
    own = {"sandbox_partition": "cpu"}
    assert "constraint" not in stated(
        sandbox_script(config_of(constraint="ib", sandbox=own), tmp_path)
    )
    named = config_of(constraint="gpu", sandbox={**own, "sandbox_constraint": "cpu"})
    assert "--constraint=cpu" in sandbox_script(named, tmp_path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[fleet]\nengines = 1", "--engine-sbatch"),
        ("[sandbox]\nsandbox_backend = 'slurm'\nsandbox_constraint = 'a b'", "constraint"),
    ],
)
def test_a_check_makes_the_other_jobs_too(tmp_path: Path, table: str, said: str) -> None:
    """Before the run is submitted, not after it."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[cluster]\ngpu_request = 'none'\nsbatch = ['{TYPED}']\n{table}\n")
    lines = check_problems(load([recipe], {}), None)
    assert any(said in line for line in lines), lines


def test_engines_of_a_run_with_its_own_gpu_request_need_theirs(tmp_path: Path) -> None:
    values = {"gpu_request": "none", "sbatch": [TYPED, "--cpus-per-gpu=8", "--wckey=rl"]}
    with pytest.raises(ConfigError, match=r"--sbatch --gres=gpu:h100:8.*use --engine-sbatch"):
        engine_settings(config_of(**values))
    of_engines = {"engine_sbatch": ["--gres=gpu:a100:1"]}
    script = engine_script(config_of(**values, fleet=of_engines), tmp_path)
    assert "--gres=gpu:a100:1\n" in script and "wckey" not in script and "cpus" not in script
    assert not stated(sandbox_script(config_of(**values), tmp_path)) & {"gres", "cpus-per-gpu"}
    other = {"engine_gpu_type": "a100"}
    script = engine_script(config_of(gpu_type="h100", fleet=other), tmp_path)
    assert "--gres=gpu:a100:1\n" in script


def test_every_job_states_them_one_line_each_before_its_own() -> None:
    for script in scripts(TASK):
        assert script.splitlines()[1:5] == [
            "#SBATCH --licenses=site:8",
            """#SBATCH --comment='it'"'"'s 8 # a'""",
            "#SBATCH --nice",
            "#SBATCH --wckey=rl",
        ]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--part=gpu", "the job states --partition itself; use --partition"),
        ("--container-image=x", "use --container and --container-image"),
        *((word, "write --NAME or --NAME=VALUE") for word in ("-Lsite", "licenses=site", "--")),
        *((f"--comment={text}", "nothing is expanded") for text in ("$HOME", "`id`", "a\\b")),
        ("--comment=a\nb", "contains a line break"),
    ],
)
def test_a_word_that_is_refused_names_the_remedy(word: str, remedy: str) -> None:
    with pytest.raises(SpecError) as error:
        a_job(sbatch=(word,))
    assert remedy in str(error.value)


def test_a_part_of_a_node_may_have_a_bound_of_memory() -> None:
    assert "#SBATCH --mem=9G\n" in render_sbatch(a_job(exclusive=False, sbatch=("--mem=9G",)))


def test_a_sandbox_server_states_its_own_memory(tmp_path: Path) -> None:
    config = config_of(exclusive=False, sbatch=["--mem-per-cpu=4G", "--wckey=rl"])
    spec = sandbox_spec(RunFolder(tmp_path), config)
    assert spec.job.sbatch == ("--wckey=rl",) and "--mem=" in render_sandbox(spec)


def test_a_refusal_names_the_flag_and_its_value() -> None:
    with pytest.raises(SpecError, match=r"^--sbatch --array=0-3: a run is one job; use rlpost"):
        job_spec(config_of(sbatch=["--array=0-3"]))
