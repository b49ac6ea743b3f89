"""Facts of this machine that the checks depend on: driver, GPUs, and the libraries of the GPU
stack.

Output: a ``Machine``, and messages about missing parts. A separate process imports the libraries,
so that the process that waits for the checks holds no GPU memory:

    python -m tools.gpu_check.machine      prints the machine as JSON
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

PACKAGES = (
    "megatron-core",
    "transformer-engine",
    "sglang",
    "sglang-kernel",
    "torch-memory-saver",
    "ray",
)
PROBE_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Gpu:
    """A GPU that is visible to torch."""

    name: str
    memory_gb: float
    capability: str


@dataclass(frozen=True)
class Machine:
    """Facts of a machine; None: missing."""

    driver: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """The CUDA version that torch was built for."""
    gpus: tuple[Gpu, ...] = ()
    packages: dict[str, str | None] = field(default_factory=dict)
    cpu_count: int = 0
    error: str | None = None
    """Why the libraries could not be queried."""

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Machine:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**document, "gpus": tuple(Gpu(**one) for one in document["gpus"])})

    def obstacles(self) -> list[str]:
        """Reasons why no check can run; empty if the checks can run."""
        found = []
        if self.driver is None:
            found.append("no NVIDIA driver answers (nvidia-smi)")
        if self.error is not None:
            found.append(f"the libraries cannot be asked: {self.error}")
        elif self.torch is None:
            found.append("torch is not installed")
        elif self.torch_cuda is None:
            found.append(f"torch {self.torch} is built without CUDA")
        elif not self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            shown = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
            found.append(f"torch {self.torch} (CUDA {self.torch_cuda}) sees no GPU{shown}")
        return found

    def lacks(self) -> list[str]:
        """Missing packages of single checks, which are skipped or fail for that reason."""
        return [f"{name} is not installed" for name in PACKAGES if self.packages.get(name) is None]

    def lines(self) -> list[str]:
        """Lines for the head of a report."""
        gpus = (
            ", ".join(
                f"{gpu.name} {gpu.memory_gb:.0f} GB (sm_{gpu.capability})" for gpu in self.gpus
            )
            or "none"
        )
        versions = ", ".join(f"{name} {version or '-'}" for name, version in self.packages.items())
        lines = [
            f"GPUs: {gpus}; driver {self.driver or '-'}; {self.cpu_count} CPU cores",
            f"torch {self.torch or '-'} (CUDA {self.torch_cuda or '-'}), {versions}",
        ]
        return [*lines, "; ".join(self.lacks())] if self.lacks() else lines


def examine() -> Machine:
    """Read the machine's facts in a new process."""
    command = [sys.executable, "-m", "tools.gpu_check.machine"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=True
        )
        return Machine.from_json(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.SubprocessError, ValueError, LookupError) as error:
        said = " ".join((getattr(error, "stderr", None) or str(error)).split())[-200:]
        return Machine(
            driver=_driver(), packages=_packages(), cpu_count=os.cpu_count() or 0, error=said
        )


def _seen_from_here() -> Machine:
    torch_version, cuda, gpus = _torch()
    return Machine(_driver(), torch_version, cuda, gpus, _packages(), os.cpu_count() or 0)


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception:  # no package, no driver, no permission
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _torch() -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    try:
        import torch
    except Exception:  # ImportError, or a shared library of CUDA that does not load
        return None, None, ()
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        seen = torch.cuda.get_device_properties(number)
        gpus.append(Gpu(seen.name, round(seen.total_memory / 1e9, 1), f"{seen.major}{seen.minor}"))
    return torch.__version__, torch.version.cuda, tuple(gpus)


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_seen_from_here())))
