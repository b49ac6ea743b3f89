"""Fixtures of the tests on real Slurm."""

from tests.cluster.fixtures import lab, lab_without_user_signal, slurm_available

__all__ = ["lab", "lab_without_user_signal", "slurm_available"]
