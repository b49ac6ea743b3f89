"""rlpost: GRPO training that survives preemption, from a Slurm login node to a finished run."""

__version__ = "0.2.0"
