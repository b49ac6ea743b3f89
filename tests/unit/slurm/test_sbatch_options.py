"""Options of sbatch that a site adds: all are accepted but those that the job itself states."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from common.run_folder import RunFolder
from rlpost.cli.job import job_spec
from rlpost.cli.sandboxes import sandbox_spec
from rlpost.config.tree import Config
from slurm.arrays import FleetSpec, SandboxSpec
from slurm.errors import SpecError
from slurm.render import render_conversion, render_fleet, render_look, render_sandbox, render_sbatch
from slurm.sbatch_options import RESERVED
from slurm.spec import JobSpec

SITE = ("--licenses=site:8", "--comment=it's 8 # a", "--nice", "--wckey=rl")
TASK = JobSpec(home="/h", python="/p", run_folder="/r", sbatch=SITE, output="/r/log")


def scripts(task: JobSpec) -> list[str]:
    """The batch file of each kind of job."""
    server = replace(task, gpu_request="none", exclusive=False)
    return [
        render_sbatch(replace(task, nodes=4, spare_nodes=1, segment=5, requeue="chain")),
        render_fleet(FleetSpec(task, 2, after="7")),
        render_sandbox(SandboxSpec(server, 2, places=4, memory_mib=9, after="7")),
        render_conversion(replace(task, gpu_request="gpus-per-node", requeue="never"), "/save"),
        render_look(task),
    ]


def test_every_job_states_them_one_line_each_before_its_own() -> None:
    for script in scripts(TASK):
        assert script.splitlines()[1:5] == [
            "#SBATCH --licenses=site:8",
            """#SBATCH --comment='it'"'"'s 8 # a'""",
            "#SBATCH --nice",
            "#SBATCH --wckey=rl",
        ]


def test_no_job_states_an_option_that_a_site_may_replace() -> None:
    """But for --cpus-per-task of a sandbox server, whose own line comes last."""
    stated = {
        name
        for script in scripts(replace(TASK, sbatch=()))
        for line in re.findall(r"(?m)^#SBATCH (.*)$", script)
        for name in re.findall(r"(?:^| )--([a-z-]+)", line)
    }
    assert len(stated) > 12 and stated - set(RESERVED) == {"cpus-per-task"}


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--partition=gpu", "the job states --partition itself; use --partition"),
        ("--part=gpu", "the job states --partition itself; use --partition"),
        ("--job-name=x", "use --job-name"),
        ("--nodes=2", "use --nodes and --spare-nodes"),
        ("--gpus=8", "use --gpu-request and --num-gpus-per-node"),
        ("--mem=9G", "use --exclusive false"),
        ("--array=0-3", "a run is one job"),
        ("--wrap=true", "use --setup-commands"),
        ("--parsable", "leave the option out"),
        ("--test-only", "rlpost submit --test-only"),
        ("--container-image=x", "use --container and --container-image"),
        ("--export=ALL", "use --environment"),
        *((word, "write --NAME or --NAME=VALUE") for word in ("-Lsite", "licenses=site", "--")),
        *((f"--comment={text}", "nothing is expanded") for text in ("$HOME", "`id`", "a\\b")),
        ("--comment=a\nb", "contains a line break"),
    ],
)
def test_what_the_job_states_itself_is_refused_with_the_setting_to_use(
    word: str, remedy: str
) -> None:
    with pytest.raises(SpecError) as error:
        JobSpec(sbatch=(word,))
    assert remedy in str(error.value)


def test_a_part_of_a_node_may_have_a_bound_of_memory() -> None:
    assert "#SBATCH --mem=9G\n" in render_sbatch(JobSpec(exclusive=False, sbatch=("--mem=9G",)))


def test_a_sandbox_server_states_its_own_memory(tmp_path: Path) -> None:
    cluster = {"exclusive": False, "sbatch": ["--mem-per-cpu=4G", "--wckey=rl"]}
    spec = sandbox_spec(RunFolder(tmp_path), Config.model_validate({"cluster": cluster}))
    assert spec.job.sbatch == ("--wckey=rl",) and "--mem=" in render_sandbox(spec)


def test_a_refusal_names_the_flag_and_its_value() -> None:
    config = Config.model_validate({"cluster": {"sbatch": ["--array=0-3"]}})
    with pytest.raises(SpecError, match=r"^--sbatch --array=0-3: the job states --array itself"):
        job_spec(config)
