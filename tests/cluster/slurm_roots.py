"""Slurm of other Debian releases, for the lab: the release's packages, unpacked into a folder.

Input: the name of a release. Output: a folder with its files, made once per machine and kept in
``$RLPOST_LAB_CACHE`` (default: ~/.cache/rlpost), under a key of its package list. Remove the folder
to get the newest packages again. Needs root, debootstrap and a Debian mirror.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cache import cache_folder
from tests.cluster.lab_host import LabError, waiting_lock

RELEASES = ("trixie", "sid")
"""Debian 13 with Slurm 24.11, and unstable, whose Slurm was 26.05 in 2026."""
PACKAGES = ("slurmctld", "slurmd", "slurm-client")
PROGRAMS = ("debootstrap", "dpkg-deb", "unshare")
MIRROR = "http://deb.debian.org/debian"
MAKE_S = 300


def usr_mount(root: Path) -> list[str]:
    """Arguments of ``mount`` that put the release's /usr over that of the machine.

    An overlay instead of a change of root: Slurm and the libraries that it loads come from the
    release, and jobs still find the machine's Python, tools and folders at their paths. A newer
    libc runs programs that were linked with an older one.
    """
    return ["-t", "overlay", "overlay", "-o", f"lowerdir={root}/usr:/usr", "/usr"]


def find_or_make(release: str) -> Path:
    """Return the folder with the files of this release; download and unpack them if it is missing.

    Raises:
        LabError: it cannot be made or used here, with the reason.
    """
    root, reason = _root_or_reason(release)
    if root is None:
        raise LabError(f"no Slurm of Debian {release}: {reason}")
    return root


@functools.cache  # without a network, the first test alone waits for the failure
def _root_or_reason(release: str) -> tuple[Path | None, str]:
    if release not in RELEASES:
        return None, f"unknown release; choose one of {', '.join(RELEASES)}"
    if os.geteuid() != 0:
        return None, "it needs root, to mount its files"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return None, f"it needs {', '.join(missing)}; on Debian: apt-get install debootstrap"
    cache = cache_folder()
    key = hashlib.sha256(" ".join((release, *PACKAGES)).encode()).hexdigest()[:12]
    root = cache / f"slurm-{release}-{key}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with waiting_lock(cache):
            if not root.exists():
                _make(release, root)
        mount = ["mount", *usr_mount(root)]
        _run("unshare", "--mount", "sh", "-c", '"$@" && slurmctld -V', "sh", *mount)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or getattr(error, "stdout", None) or ""
        return None, "\n".join([str(error), *str(said).splitlines()[-3:]])
    return root, ""


def _make(release: str, root: Path) -> None:
    """Make the folder; the caller holds the lock of the cache."""
    for left in root.parent.glob(f".{root.name}-*"):  # by a process that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f".{root.name}-", dir=root.parent) as folder:
        downloaded, unpacked = Path(folder, "downloaded"), Path(folder, "unpacked")
        selected = ("--variant=minbase", f"--include={','.join(PACKAGES)}")
        # --kill-child: a timeout ends its downloads as well
        isolated = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        fetch = ("debootstrap", "--force-check-gpg", "--download-only", *selected)
        _run(*isolated, *fetch, release, str(downloaded), _mirror())
        # Unpacked, not installed: the lab only reads the files.
        for package in sorted(downloaded.glob("var/cache/apt/archives/*.deb")):
            _run("dpkg-deb", "--extract", str(package), str(unpacked))
        unpacked.chmod(0o755)
        unpacked.rename(root)


def _mirror() -> str:
    """The mirror from which this machine gets its packages, if it is a Debian machine."""
    ask = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    answer = subprocess.run([*ask, "Origin: Debian"], capture_output=True, text=True, check=False)
    mirrors = [line.rstrip("/") for line in answer.stdout.splitlines()]
    return next((mirror for mirror in mirrors if mirror.endswith("/debian")), MIRROR)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=MAKE_S)
