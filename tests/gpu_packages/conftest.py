"""Tests of the GPU lock's packages, in their own environment: ``make test-gpu-packages``.

Everywhere else they are not collected. The environment has a libcuda.so.1 without devices, with which
CUDA builds import and find no GPU.
"""

import os

VARIABLE = "RLPOST_GPU_PACKAGES"
"""Set by tools/gpu_packages.sh: the folder of the driver library without devices."""

if VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]
