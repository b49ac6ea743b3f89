"""placeholder"""

from collections.abc import Mapping


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return dict(environ)


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    drop = ("SLURM_GPU", "SLURM_MEM", "SQUEUE_", "SLURM_TRES")
    return {
        n: v
        for n, v in environ.items()
        if not n.startswith(drop)
        and n
        not in (
            "SLURM_CPUS_PER_GPU",
            "SLURM_NTASKS_PER_GPU",
            "SLURM_EXPORT_ENV",
            "SLURM_CPUS_PER_TASK",
        )
    }
