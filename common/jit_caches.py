"""Folders of kernels that are compiled on demand: Triton, Inductor, FlashInfer, DeepGEMM, CUDA.

By default they are below the home folder. If that is on a network file system, processes of several
nodes compile into one folder at the same time. The locks of these libraries hold on one node alone,
and a library that another node replaces fails as a stale file handle
(https://github.com/sgl-project/sglang/issues/31347,
https://github.com/PrimeIntellect-ai/prime-rl/pull/2305). Then the folders are on the node's disk.

TorchInductor's is ``/tmp/torchinductor_USER`` by default. torch loads pickles and libraries from it
even if another user made it, so it is moved on every node.

Input: the environment, and the mounts of this node. Output: variables to add to the environment.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from common.files import own_folder

logger = logging.getLogger(__name__)

BASE = "SGLANG_CACHE_DIR"
FOLDERS: Mapping[str, str] = {
    BASE: "",
    "FLASHINFER_WORKSPACE_BASE": "",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "nv",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TILELANG_CACHE_DIR": "tilelang",
}
"""Folder of each variable below that of ``BASE``, as SGLang chooses them for engines
(``third_party_cache_defaults`` of sglang/srt/environ.py); it also puts DeepGEMM there.
"""
IN_TMP = ("TORCHINDUCTOR_CACHE_DIR",)
"""Those whose default is in /tmp, by a name that anyone can take."""
OF_SGLANG = ".cache/sglang"  # default of ``BASE``, below the home folder


def needs_local_caches(home: str, mounts: str) -> bool:
    """Whether the home folder is on a network file system.

    Args:
        home: its absolute path, without symbolic links.
        mounts: the text of /proc/mounts.
    """
    return is_remote(mount_of(home, mounts))


def cache_variables(environ: Mapping[str, str], base: Path) -> dict[str, str]:
    """Return the variables that the user has not set, with their folders below ``base``."""
    return {name: str(base / FOLDERS[name]) for name in FOLDERS if name not in environ}


def is_safe_home(home: str) -> bool:
    """Whether caches below this home folder are possible and out of reach of other users."""
    return os.access(home, os.W_OK) and not os.stat(home).st_mode & 0o022


def jit_cache_environment(
    environ: Mapping[str, str], *, disk: Path = Path("/tmp")
) -> dict[str, str]:
    """Return variables that move caches of this node to ``disk``, or from there to the home folder.

    All jobs of a user share the folder, so that a restart finds compiled kernels. A user who sets
    ``BASE`` chooses the folder of all of them: in a container, whose home and /tmp may go with the
    attempt, a mounted one.
    """
    try:
        home = os.path.realpath(environ.get("HOME") or Path.home())
        chosen = environ.get(BASE)
        is_remote_home = needs_local_caches(home, Path("/proc/self/mounts").read_text())
        if not chosen and not is_remote_home and is_safe_home(home):
            variables = cache_variables(environ, Path(f"{home}/{OF_SGLANG}"))
            return {name: value for name, value in variables.items() if name in IN_TMP}
        base = Path(chosen) if chosen else own_folder(disk / f"rlpost-jit-{os.geteuid()}")
    except (OSError, RuntimeError) as error:
        logger.warning("caches of compiled kernels stay in the home folder: %s", error)
        return {}
    why = "on a network" if is_remote_home else "missing, read-only or open to others"
    why = f"{BASE} is set" if chosen else f"{home} is {why}"
    logger.info("caches of compiled kernels: %s, because %s", base, why)
    return cache_variables(environ, base)


# Network file systems by the beginnings of their names in /proc/mounts.
REMOTE = (
    "dvs",
    "gfs2",
    "ocfs2",
    "pvfs2",
    "virtiofs",
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "9p",
    "wekafs",
    "fuse.",
    "afs",
    "panfs",
)
# Images of containers, mounted by enroot without root.
LOCAL_FUSE = ("fuse.fuse-overlayfs", "fuse.squashfuse")
_OCTAL = re.compile(r"\\([0-7]{3})")  # /proc/mounts has \040 for a blank


def mount_of(path: str, mounts: str) -> str | None:
    """Type of the file system that holds an absolute path, from the text of /proc/mounts.

    Nothing of the path is touched: a file system whose server is gone would block the caller.
    """
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[1])
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and (best is None or len(point) >= best[0]):  # a later mount hides an earlier one
            best = (len(point), fields[2])
    return best[1] if best else None


def is_remote(kind: str | None) -> bool:
    """Whether a type of file system is one of a network; False for an unknown one."""
    return kind is not None and kind.startswith(REMOTE) and not kind.startswith(LOCAL_FUSE)
