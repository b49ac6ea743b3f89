"""The CUDA runtime for libraries that are loaded before Python starts.

torch finds the CUDA runtime of its wheels by paths in its libraries. A library in LD_PRELOAD has no
such paths: SGLang preloads that of torch_memory_saver in engines that release their memory, and
where the loader does not find libcudart, the process ends with exit code 127 before Python starts.

Input: an environment and the installed packages. Output: the environment in which the loader finds
the runtime, and whether the preloaded library really loads.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "LD_LIBRARY_PATH"
RUNTIME, SAVER = "nvidia-cuda-runtime", "torch-memory-saver"
"""Distributions of the runtime and of the preloaded library."""
_LOADER_S = 20.0


def with_runtime(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with the folder of the installed CUDA runtime behind the others.

    Unchanged where no runtime is installed as a package.
    """
    files = _files(RUNTIME, "libcudart.so.")
    if not files:
        return dict(environ)
    folders = [one for one in environ.get(VARIABLE, "").split(":") if one]
    folder = str(files[0].parent)
    return {**environ, VARIABLE: ":".join([*folders, *([] if folder in folders else [folder])])}


def preload_problem(environ: Mapping[str, str], cuda: str) -> str | None:
    """Return why an engine that releases its memory cannot start; "" if it can, None if unknown.

    Runs a program of the system with the library that SGLang preloads, in the environment that
    engines get.

    Args:
        cuda: version of CUDA that torch is built for, "13.0".
    """
    libraries = _files(SAVER, f"torch_memory_saver_hook_mode_preload_cu{cuda.partition('.')[0]}.")
    if not libraries:
        return None
    try:
        ended = subprocess.run(
            ["/bin/true"],
            env={**with_runtime(environ), "LD_PRELOAD": str(libraries[0]), "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=_LOADER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # The loader ignores a library that it cannot preload with a line alone.
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    return "" if not ended.returncode and not said else said[-1] if said else "it ends at once"


def _files(distribution: str, name: str) -> list[Path]:
    """Return the installed files of a distribution whose names begin with ``name``."""
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return sorted(Path(str(file.locate())) for file in files if file.name.startswith(name))
