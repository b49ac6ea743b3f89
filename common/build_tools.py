"""Build tools that libraries for GPUs call while a run starts: a C compiler, Python.h, ninja.

Triton compiles a launcher in C for each of its kernels, in every rank and engine. FlashInfer and
SGLang build kernels with ninja, which comes as a package, and look for it in PATH; a process that
is started by the path of its interpreter has no folder of the environment there.

Input: an environment and this interpreter. Output: the environment in which ninja is found, and
whether a launcher really compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

_COMPILE_S = 60.0
_SOURCE = "#include <Python.h>\nint launcher(void) { return PY_MAJOR_VERSION; }\n"


def with_scripts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment, with this interpreter's folder of programs behind the others."""
    folder = str(Path(sys.executable).parent)
    folders = [one for one in environ.get("PATH", os.defpath).split(os.pathsep) if one]
    return {**environ, "PATH": os.pathsep.join(dict.fromkeys([*folders, folder]))}


def lacking_tools(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what an engine that starts in this environment does not find: ninja, a C++ compiler.

    tvm_ffi takes $CXX or c++ (``cpp/extension.py``), and nvcc needs one, too.
    """
    path = with_scripts(environ)["PATH"]
    tools = ("ninja", environ.get("CXX") or "c++")
    return tuple(name for name in tools if shutil.which(name, path=path) is None)


def launcher_problem(environ: Mapping[str, str]) -> str | None:
    """Return why Triton cannot compile a launcher; "" if it can, None if that is unknown.

    The compiler and the folder of headers are those of triton/runtime/build.py.
    """
    path = environ.get("PATH", os.defpath)
    compiler = (
        environ.get("CC") or shutil.which("gcc", path=path) or shutil.which("clang", path=path)
    )
    if not compiler:
        return "there is no C compiler (gcc, clang, or CC)"
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, whose folder of headers does not exist
        scheme = "posix_prefix"
    headers = sysconfig.get_paths(scheme)["include"]
    words = [compiler, "-x", "c", "-", "-shared", "-fPIC", f"-I{headers}", "-o"]
    try:
        with tempfile.TemporaryDirectory(prefix="rlpost-") as folder:
            ended = subprocess.run(
                [*words, f"{folder}/launcher.so"],
                env={**environ, "LC_ALL": "C"},
                input=_SOURCE,
                capture_output=True,
                text=True,
                timeout=_COMPILE_S,
                check=False,
            )
    except FileNotFoundError as error:
        return str(error)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not ended.returncode:
        return ""
    lines = [line for line in ended.stderr.splitlines() if "error" in line] or [
        f"{compiler} ended with {ended.returncode}"
    ]
    return lines[0].strip()
