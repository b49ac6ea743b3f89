"""sbatch and srun get no variable that would override options of the job."""

from slurm.environment import for_script, outside_any_job
from slurm.render import render_sbatch
from slurm.spec import JobSpec

SALLOC = {
    "SLURM_JOB_ID": "3",
    "SLURM_GPUS": "1",
    "SRUN_CPUS_PER_TASK": "2",
    "SUBMITIT_EXECUTOR": "slurm",
}
USER = {
    "HOME": "/home/me",
    "SLURM_CONF": "/etc/slurm.conf",
    "SBATCH_ACCOUNT": "rl",
    "SQUEUE_FORMAT": "%j",
}


def test_of_an_outer_job_nothing_is_left_and_of_the_user_everything() -> None:
    assert outside_any_job(SALLOC | USER) == USER


def test_what_the_script_says_has_no_variable_beside_it_and_the_rest_has() -> None:
    script = render_sbatch(JobSpec(nodes=2, partition="low", exclusive=True, time="10"))
    winning = (
        "PARTITION",
        "TIMELIMIT",
        "MEM_PER_CPU",
        "MEM_PER_NODE",
        "NO_REQUEUE",
        "REQUEUE",
        "SIGNAL",
        "OPEN_MODE",
    )
    winning += ("OUTPUT", "JOB_NAME", "EXCLUSIVE", "GRES")
    assert for_script(USER | SALLOC | {f"SBATCH_{name}": "x" for name in winning}, script) == USER
    said = render_sbatch(JobSpec(nodes=2, account="mine"))
    assert "SBATCH_ACCOUNT" not in for_script(USER, said) and "SBATCH_PARTITION" in for_script(
        {"SBATCH_PARTITION": "x"}, said
    )


def test_words_of_the_script_that_are_no_options_of_sbatch_hide_nothing() -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=1\nsrun --partition=low # --account\n"
    kept = {"SBATCH_PARTITION": "x", "SBATCH_ACCOUNT": "y"}
    assert for_script(kept, script) == kept
