"""Every error of this package.

SlurmError
  SpecError(ValueError)       a value of a job spec cannot go into a batch script
  NodelistError(ValueError)   a host list cannot be read
  SnapshotError               the code cannot be copied
  SubmitError                 sbatch rejected the job
  JobError                    Slurm does not know the job, rejects a command, or does not answer
"""


class SlurmError(Exception):
    """Base of all of them."""


class SpecError(SlurmError, ValueError):
    """A value of a job spec cannot go into a batch script."""


class NodelistError(SlurmError, ValueError):
    """A host list cannot be read."""


class SnapshotError(SlurmError):
    """The code cannot be copied."""


class SubmitError(SlurmError):
    """sbatch did not take the job."""


class JobError(SlurmError):
    """Slurm does not know the job, refuses an order, or does not answer."""
