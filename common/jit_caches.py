"""Folders of kernels that are compiled on demand: Triton, FlashInfer, DeepGEMM, tvm-ffi, CUDA.

By default they are below the home folder. Where a node cannot write to it, engines die. If it is on
a network file system, processes of several nodes compile into one folder at the same time. The locks
of these libraries hold on one node alone, and a library that another node replaces fails as a stale
file handle (https://github.com/sgl-project/sglang/issues/31347,
https://github.com/PrimeIntellect-ai/prime-rl/pull/2305). In both cases the folders are on the node's
disk.

Input: the environment, and the mounts of this node. Output: variables to add to the environment.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common.file_systems import is_remote, mount_of

logger = logging.getLogger(__name__)

BASE = "SGLANG_CACHE_DIR"
FOLDERS: Mapping[str, str] = {
    BASE: "",
    "FLASHINFER_WORKSPACE_BASE": "",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "nv",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
}
"""Folder of each variable below that of ``BASE``, as SGLang chooses them for engines
(``third_party_cache_defaults`` of sglang/srt/environ.py); it also puts DeepGEMM, TileLang and
TorchInductor there.
"""


def needs_local_caches(home: str, mounts: str) -> bool:
    """Whether the home folder is on a network file system.

    Args:
        home: its absolute path, without symbolic links.
        mounts: the text of /proc/mounts.
    """
    return is_remote(mount_of(home, mounts))


def can_write(folder: str) -> bool:
    """Whether a file can be created in a folder; it leaves none."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cache_variables(environ: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return the variables that the user has not set, with their folders below ``base``."""
    return {name: str(base / FOLDERS[name]) for name in FOLDERS if name not in environ}


def own_folder(path: Path) -> Path:
    """Return a folder that only this user can write to: ``path`` or, if that is another's, a new one.

    Programs load libraries from it, so it must not be anyone else's. Raises OSError.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not (stat.S_ISDIR(status.st_mode) and is_private):
            return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
    return path


def jit_cache_environment(
    environ: Mapping[str, str], *, disk: Path = Path("/tmp")
) -> dict[str, str]:
    """Return variables that move the caches of this node to ``disk``; empty if they are local and writable.

    All jobs of a user share the folder, so that a restart finds compiled kernels. A user who sets
    ``BASE`` chooses the folder of all of them.
    """
    try:
        home = os.path.realpath(environ.get("HOME") or Path.home())
        is_shared = needs_local_caches(home, Path("/proc/self/mounts").read_text())
        if not is_shared and can_write(home):
            return {}
        given = environ.get(BASE)
        base = Path(given) if given else own_folder(disk / f"rlpost-jit-{os.geteuid()}")
    except (OSError, RuntimeError) as error:
        logger.warning("caches of compiled kernels stay in the home folder: %s", error)
        return {}
    why = "is on a network" if is_shared else "cannot be written to"
    logger.info("caches of compiled kernels: %s, because %s %s", base, home, why)
    return cache_variables(environ, base)
