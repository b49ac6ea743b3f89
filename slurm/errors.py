"""Exceptions of this package.

SlurmError
  SpecError(ValueError)       a value of a job spec cannot go into a batch script
  SnapshotError               the code cannot be copied
  SubmitError                 sbatch rejected the job
    UnknownJobError           sbatch may have accepted the job, and printed no id
  JobError                    Slurm does not know the job, rejects a command, or does not answer
"""


class SlurmError(Exception):
    """Base class of this package's exceptions."""


class SpecError(SlurmError, ValueError):
    """A value of a job spec cannot go into a batch script."""


class SnapshotError(SlurmError):
    """The code cannot be copied."""


class SubmitError(SlurmError):
    """sbatch rejected the job."""


class UnknownJobError(SubmitError):
    """sbatch may have accepted the job, whose id is not known."""


class JobError(SlurmError):
    """Slurm does not know the job, rejects a command, or does not answer."""
