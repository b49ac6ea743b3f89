"""Fixtures of the tests on real Slurm."""

from tests.cluster.fixtures import (
    lab,
    lab_without_user_signal,
    pytest_generate_tests,
    slurm_available,
    slurm_release,
)

__all__ = [
    "lab",
    "lab_without_user_signal",
    "pytest_generate_tests",
    "slurm_available",
    "slurm_release",
]
